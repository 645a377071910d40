"""One rollout from start to end: the time limit, the clean-up, and the classification of its ending.

    start ──► wait (time limit) ──► done ─────────────► judge ──► clean-up ──► Outcome
                   │                                                ▲
                   ├─ over the limit ─► cancel, grace, force ───────┤ timeout
                   └─ harness cancelled ─► cancel, grace, force ────┘ CancelledError

Whatever the agent does, every arrow has a deadline, and a failed rollout is data, not an exception.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time

from insitu.errors import describe
from insitu.json_values import JsonValue, parse_json
from insitu.system.tasks import finish
from insitu.types import Ending
from insitu.user_traceback import UserTraceback, user_traceback
from insitu.workflow.classify import ending_of
from insitu.workflow.context import WorkflowContext, entered
from insitu.workflow.hints import hint_of
from insitu.workflow.outcome import Outcome, WorkflowFailed
from insitu.workflow.waiting import end_task
from insitu.workflow.workflow import Workflow

GRACE_SECONDS = 5.0
"""Time an agent has to stop after cancellation."""


async def execute(
    workflow: Workflow,
    value: object,
    context: WorkflowContext,
    timeout_seconds: float,
    *,
    grace_seconds: float = GRACE_SECONDS,
) -> Outcome:
    """Run one rollout. Raises only the harness's own cancellation, after the clean-up."""
    started = time.monotonic()
    task = asyncio.create_task(_run(workflow, value, context))
    try:
        await asyncio.wait({task}, timeout=timeout_seconds)
    finally:
        seconds = time.monotonic() - started
        ended = await finish(_conclude(task, context, seconds, timeout_seconds, grace_seconds))
    return ended


async def _run(workflow: Workflow, value: object, context: WorkflowContext) -> JsonValue:
    """Run the agent on a copy of the input, which other rollouts of the example share."""
    with entered(context):
        try:
            return _as_json(await workflow.run(copy.deepcopy(value), context))
        except SystemExit as error:  # would end the whole program from within a task
            raise WorkflowFailed(
                f"SystemExit: the agent called sys.exit({error.code!r})",
                hint="return a value or raise an exception instead",
            ) from error


async def _conclude(
    task: asyncio.Task[JsonValue],
    context: WorkflowContext,
    seconds: float,
    timeout_seconds: float,
    grace_seconds: float,
) -> Outcome:
    traceback: UserTraceback | None = None
    if task.done():
        ending, output, reason, traceback = _judge(task, context)
    else:
        ending, output = Ending.TIMEOUT, None
        reason = await _stop(task, timeout_seconds, grace_seconds)
    reasons = [reason, *await context.close()]
    return Outcome(ending, output, "; ".join(filter(None, reasons)), seconds, traceback)


def _judge(
    task: asyncio.Task[JsonValue], context: WorkflowContext
) -> tuple[Ending, JsonValue, str, UserTraceback | None]:
    if task.cancelled():
        return Ending.TOOL_ERROR, None, "CancelledError: the agent cancelled itself", None
    error = task.exception()
    if error is None:
        return Ending.COMPLETED, task.result(), "", None
    reason = "; ".join(filter(None, (describe(error), hint_of(error, context.binding))))
    return ending_of(error), None, reason, user_traceback(error)


async def _stop(task: asyncio.Task[JsonValue], timeout_seconds: float, grace_seconds: float) -> str:
    reason = f"no result within {timeout_seconds:g} s"
    asked = time.monotonic()
    if not await end_task(task, grace_seconds):
        return f"{reason}; the agent ignored its cancellation and was abandoned, still running"
    error = None if task.cancelled() else task.exception()
    if time.monotonic() - asked >= grace_seconds:
        return f"{reason}; the agent ignored its cancellation for {grace_seconds:g} s and was ended by force"
    return f"{reason}; while stopping: {describe(error)}" if error else reason


def _as_json(output: object) -> JsonValue:
    """Round-trip the output through JSON: an independent copy, identical to what a file will hold."""
    try:
        text = json.dumps(output, allow_nan=False, ensure_ascii=False)
        text.encode()
        return parse_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WorkflowFailed(
            f"the output is a {type(output).__name__} that is not JSON: {describe(error)}",
            hint="return text, numbers, lists and dicts",
        ) from None
