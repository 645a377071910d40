"""One model call from hold to record, attempt by attempt.

    admit (hold) → resolve → choose replica → render → restore ids → generate → verify
        → derender → record → answer

An attempt that fails before anything was sent is retried, on another replica if there is one, and leaves no
record; one whose engine was lost while it generated is retried once (`insitu.gateway.calls.suspects`). Every
other call whose generation began is submitted to the recorder once, at its end: complete, or as far as it got
when the client left (`cancelled`) or the engine failed (`broken`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from insitu.errors import InsituError, InvalidRequest, Unavailable, UpstreamError
from insitu.gateway.calls.attempt import Attempt, CallContext, timed
from insitu.gateway.calls.choices import Choice, choices_of, merged, together
from insitu.gateway.calls.suspects import ALONE_SECONDS, Suspects
from insitu.gateway.engines.replicas import Replica, ReplicaPool
from insitu.gateway.engines.routes import Routes, Target
from insitu.gateway.engines.sample import Sample, verify
from insitu.gateway.engines.sample import partial as partial_sample
from insitu.gateway.engines.upstream import GENERATE_PATH
from insitu.gateway.protocols.base import Answer, Lane
from insitu.gateway.protocols.request import MASKING_FIELDS
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.sampled_ids.restore import Restorer
from insitu.gateway.sampled_ids.tokenizers import Tokenizers
from insitu.gateway.shared.counts import Counts
from insitu.gateway.shared.faults import (
    ClientGone,
    Fault,
    GrammarFailed,
    PreparationFailed,
    ReplicaBusy,
    ReplicaFailed,
    ReplicaLost,
    UnexpectedShape,
    VersionMismatch,
)
from insitu.gateway.shared.settings import Limits
from insitu.json_values import JsonObject
from insitu.types import INCOMPLETE, ModelCall

_log = logging.getLogger(__name__)
Recording = Future[None] | None
"""None if the call is kept already."""
T = TypeVar("T")
_RETRY_PAUSE_SECONDS = 0.1
_RETRY_RATIO = 0.2  # retries of answered errors, as a share of all calls
_RETRY_RESERVE = 20.0
_MOST_LOSSES = 2


async def _classified(fault: Fault, attempt: Attempt, replica: Replica) -> Fault:
    """Tell a grammar that the engine's compiler fails on from an engine that fails."""
    constrained = any(
        choice.rendered.generate["sampling_params"].get("structured_outputs") for choice in attempt.choices
    )
    if isinstance(fault, ReplicaFailed) and constrained and await replica.engine.healthy():
        return GrammarFailed(str(fault))
    return fault


def _ended_by(fault: Fault, replica: Replica) -> InsituError:
    if isinstance(fault, GrammarFailed):
        return InvalidRequest(
            f"The engine cannot compile the grammar of `response_format` or `tools`: {fault}.",
            hint="simplify the schema or its patterns",
        )
    return UpstreamError(f"The call failed on {replica.id}: {fault}.", hint="retry later")


class RetryBudget:
    """Bounds the retries of an upstream that answers with errors; lost replicas are ejected instead."""

    def __init__(self) -> None:
        self._left = _RETRY_RESERVE

    def earn(self) -> None:
        self._left = min(self._left + _RETRY_RATIO, _RETRY_RESERVE)

    def spend(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Caller:
    """Carries calls to the replicas and their records to the recorder."""

    def __init__(
        self,
        routes: Routes,
        pool: ReplicaPool,
        recorder: Recorder,
        restorer: Restorer,
        tokenizers: Tokenizers,
        limits: Limits,
        counts: Counts,
    ) -> None:
        self.routes, self.pool, self.recorder, self.restorer = routes, pool, recorder, restorer
        self.tokenizers = tokenizers
        self.limits = limits
        self.counts = counts
        self.suspects = Suspects()
        self._budget = RetryBudget()

    def refuse_unrecorded(self) -> None:
        """Reject a call before it starts if it could not be recorded."""
        if (reason := self.recorder.refusal()) is not None:
            raise Unavailable(
                f"The gateway accepts no new calls: {reason}.", hint="retry later; see the gateway's log"
            )

    async def complete(self, context: CallContext) -> Answer:
        """Answer a call in one piece and record it."""
        return await self.attempts(context, self._complete_once)

    async def attempts(self, context: CallContext, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """Run `work` until an attempt succeeds or a retry makes no sense."""
        self._budget.earn()
        tried: set[str] = set()
        mismatched = False
        for number in range(1, self.limits.max_attempts + 1):
            self.suspects.check(context)
            target, replica, held = await self._place(context, tried)
            name = context.project.shown(target.name)
            lane = Lane(replica.engine, target.engine_model, name, context.call_id)
            attempt = Attempt(context, lane, target, {"held": held})
            try:
                num_calls = context.request.num_choices
                with ExitStack() as stack:
                    stack.enter_context(self.routes.leased(target, num_calls))
                    stack.enter_context(replica.leased(num_calls))
                    if context.num_losses:
                        stack.callback(self.routes.wake)
                        stack.enter_context(self.suspects.at_work(replica.id))
                    return await self._tried(attempt, work)
            except UnexpectedShape as error:
                _log.exception(
                    "call %s: an answer of %s has an unexpected shape", context.call_id, replica.id
                )
                raise UpstreamError(
                    f"The answer of {replica.id} has an unexpected shape: {error}.",
                    hint="check the engine's version; the gateway's log has the details",
                ) from error
            except Fault as raised:
                fault = await _classified(raised, attempt, replica)
                last = number == self.limits.max_attempts or context.sent
                last = last or (mismatched and isinstance(fault, VersionMismatch))
                last = await self._counts_twice(attempt, replica, fault) or last
                if not self._may_retry(replica, fault) or last:
                    raise _ended_by(fault, replica) from fault
                tried.add(replica.id)
                mismatched = mismatched or isinstance(fault, VersionMismatch)
                await self._pause(fault, number)
        raise AssertionError("the last attempt returns or raises")

    async def render(self, attempt: Attempt) -> list[Choice]:
        """Render the prompt as the engine will see it and return the choices to generate.

        The prompt keeps the ids that earlier calls of the rollout sampled.
        """
        context, timings = attempt.context, attempt.timings
        rendered = await timed(timings, "render", context.protocol.render(attempt.lane, context.request))
        rollout_id = context.labels.rollout_id
        rendered = await self.restorer.restore(rollout_id, attempt.target, attempt.lane, rendered)
        attempt.lane = await self._with_spelling(attempt.lane)
        if (project := context.project.name) is not None:
            # Calls of others find nothing of this prompt in the engine's prefix cache, and cannot time it.
            rendered = replace(rendered, generate=rendered.generate | {"cache_salt": project})
        attempt.choices = choices_of(
            context.call_id, rendered, context.request.num_choices, timings, context.ticket.calls_before
        )
        return attempt.choices

    async def _with_spelling(self, lane: Lane) -> Lane:
        """Give an attempt the means to decode its answer here, if the tokenizer is known."""
        pieces = (await self.tokenizers.of(lane.engine, lane.engine_model)).pieces
        return replace(lane, spelling=pieces and pieces.spelling, counts=self.counts)

    def submit(
        self, attempt: Attempt, choice: Choice, sample: Sample, answer: JsonObject | None
    ) -> Recording:
        """Hand a call to the recorder; a complete one is remembered for the turns that follow.

        Its answer may end once the result is `kept`.
        """
        context, rendered = attempt.context, choice.rendered
        sampling = rendered.generate["sampling_params"]
        choice.timings["total"] = time.monotonic() - context.started
        if sample.finish_reason not in INCOMPLETE:
            self.restorer.remember(context.labels.rollout_id, attempt.target, rendered, sample.output_ids)
        recording = self.recorder.submit(
            ModelCall(
                id=context.project.stored(choice.call_id),
                rollout_id=context.labels.rollout_id,
                model=context.request.model,
                run=attempt.target.run,
                policy_step=attempt.target.step,
                policy_version=sample.version,
                prompt_ids=rendered.prompt_ids,
                output_ids=sample.output_ids,
                logprobs=sample.logprobs,
                finish_reason=sample.finish_reason,
                constrained=any(sampling.get(key) for key in MASKING_FIELDS),
                messages=context.request.body.get("messages"),
                tools=context.request.body.get("tools"),
                answer=answer,
                sampling={k: v for k, v in sampling.items() if not k.startswith("_")},
                timings=choice.timings,
                started_at=context.started_at,
                function=context.labels.function,
                protocol=context.protocol.name,
            )
        )
        choice.recorded = True
        context.ticket.recorded()
        context.spend_tokens(len(rendered.prompt_ids) + len(sample.output_ids))
        self.counts.tokens["prompt"] += len(rendered.prompt_ids)
        self.counts.tokens["output"] += len(sample.output_ids)
        return recording

    async def kept(self, recordings: Iterable[Recording]) -> None:
        """Wait until the calls outlive this process, as most do at once; Unavailable on a full disk."""
        seconds = self.limits.record_seconds
        for recording in recordings:
            if recording is None:
                continue
            try:
                await asyncio.wait_for(asyncio.wrap_future(recording), seconds)
            except TimeoutError:
                raise Unavailable(
                    f"The call could not be recorded within {seconds:.0f} s: {self.recorder.refusal()}.",
                    hint="free space on the disk of the records, then retry",
                ) from None

    async def _tried(self, attempt: Attempt, work: Callable[[Attempt], Awaitable[T]]) -> T:
        """Make one attempt; what it leaves half done is recorded as such, unless it may be retried."""
        try:
            return await work(attempt)
        except (asyncio.CancelledError, ClientGone):
            self._submit_rest(attempt, "broken" if self.routes.closing else "cancelled")
            raise
        except Exception:  # even a bug of ours: the client has a part of the answer, which must be on record
            if attempt.context.sent:
                self._submit_rest(attempt, "broken")
            raise

    def _submit_rest(self, attempt: Attempt, ended: str) -> None:
        for choice in attempt.choices:
            if not choice.recorded:
                answer = choice.text.recorded() if choice.text is not None else None
                self.submit(attempt, choice, partial_sample(choice.generated, ended, attempt.target), answer)

    async def _complete_once(self, attempt: Attempt) -> Answer:
        choices = await self.render(attempt)
        answered = await together([self._choose(attempt, choice) for choice in choices])
        await attempt.context.ticket.noted(self.limits.record_seconds)
        await self.kept(
            self.submit(attempt, choice, sample, answer.recorded)
            for choice, (sample, answer) in zip(choices, answered, strict=True)
        )
        return merged([answer for _, answer in answered])

    async def _choose(self, attempt: Attempt, choice: Choice) -> tuple[Sample, Answer]:
        """Generate one whole answer and verify it."""
        lane, request, rendered = attempt.lane, attempt.context.request, choice.rendered
        generating = lane.engine.post(GENERATE_PATH, rendered.sent(), generating=True)
        answered = await timed(choice.timings, "generate", generating)
        choice.generated.add(answered)
        sample = verify(choice.generated, len(rendered.prompt_ids), attempt.target)
        answering = attempt.context.protocol.answer(lane, request, rendered, answered, sample)
        return sample, await timed(choice.timings, "derender", answering)

    async def _place(self, context: CallContext, tried: set[str]) -> tuple[Target, Replica, float]:
        """Return the next attempt's target, replica and wait. Nothing is awaited after the table was read."""
        try:
            return await self._placed(context, tried)
        except BaseException:
            self.pool.call_waiting()  # it may have been called to a place, which is for the next then
            raise

    async def _placed(self, context: CallContext, tried: set[str]) -> tuple[Target, Replica, float]:
        started = time.monotonic()
        called = False
        """True once a place on an engine has become free for it."""
        while True:
            table = await self.routes.admit(context.request.model, context.project)
            rollout_id = context.labels.rollout_id
            target = table.resolve(context.request.model, context.project, rollout_id=rollout_id)
            run = target.run if target.is_adapter else None
            waited = time.monotonic() - started
            apart = self._apart(context) if waited < ALONE_SECONDS else []
            replica = self.pool.choose(rollout_id, tried, run, len(table.runs), without=apart)
            if replica is not None:
                if self._may_begin(replica, context, called=called):
                    return target, replica, waited
                called = await self._called(context, self.limits.hold_seconds - waited, again=called)
                continue
            left = (ALONE_SECONDS if apart else self.limits.hold_seconds) - waited
            if apart and left > 0:
                await self.routes.changed(left)
                continue
            if left <= 0:
                raise Unavailable(f"No replica became healthy within {waited:.0f} s.", hint="retry later")
            with self.routes.waiting():
                await self.routes.changed(left)

    def _may_begin(self, replica: Replica, context: CallContext, *, called: bool) -> bool:
        """Return True if there is a place on the replica and nobody has waited for it longer."""
        nobody = called or not len(self.pool.queue) + self.pool.queue.num_called
        return nobody and self.pool.has_place(replica, context.request.num_choices)

    async def _called(self, context: CallContext, seconds: float, *, again: bool) -> bool:
        """Wait for a place on an engine, which another call may still take; Unavailable if none comes."""
        sender = context.project.name, context.key
        with self.routes.waiting():
            if not await self.pool.queue.wait(sender, max(0.0, seconds), again=again):
                raise Unavailable(
                    f"No engine had a place for the call within {self.limits.hold_seconds:.0f} s.",
                    hint="make fewer calls at once, or retry later",
                )
        return True

    def _apart(self, context: CallContext) -> list[str]:
        """Return the replicas that a suspect should stay away from; one alone tells nothing of its calls."""
        return self.suspects.places() if context.num_losses and len(self.pool.replicas) > 1 else []

    async def _counts_twice(self, attempt: Attempt, replica: Replica, fault: Fault) -> bool:
        """Count what went wrong with a call; return True the second time, which is the last."""
        context = attempt.context
        if isinstance(fault, PreparationFailed):
            context.num_unprepared += 1
            return context.num_unprepared > 1
        if not attempt.generating or not isinstance(fault, ReplicaLost | ReplicaFailed):
            return False
        if not self.pool.is_current(replica) or self.routes.closing:
            return False  # the supervisor took it out, or this process ends
        if await replica.engine.healthy():
            return False  # it failed, and lives
        context.num_losses += 1
        if context.num_losses < _MOST_LOSSES:
            return False
        _log.warning("call %s: %s was lost on it, the second engine", context.call_id, replica.id)
        self.suspects.reject(context)
        return True

    def _may_retry(self, replica: Replica, fault: Fault) -> bool:
        if isinstance(fault, PreparationFailed):
            return True
        if isinstance(fault, ReplicaLost | ReplicaFailed):
            self.pool.eject(replica, str(fault))
        # All calls of a lost replica may move: it takes no more. The budget is for replicas that answer.
        return isinstance(fault, ReplicaLost) or self._budget.spend()

    async def _pause(self, fault: Fault, number: int) -> None:
        if isinstance(fault, VersionMismatch):
            await self.routes.changed(self.limits.settle_seconds)
        elif isinstance(fault, ReplicaBusy | ReplicaFailed):
            spread = random.uniform(0.5, 1.0)  # noqa: S311 (jitter, not a secret)
            await asyncio.sleep(_RETRY_PAUSE_SECONDS * 2**number * spread)
