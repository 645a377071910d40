"""RecordedCalls: the gateway's record of one rollout, split into calls that are trained on and others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from insitu.gateway_client import GatewayClient, RolloutRecord
from insitu.harness.collect.targets import Targets
from insitu.harness.rollouts.capture import (
    INCOMPLETE_CALL,
    LATE,
    OTHER_FUNCTION,
    OTHER_MODEL,
    UNFINISHED,
    UNRECORDED,
    Capture,
)
from insitu.harness.rollouts.recorded_call import RecordedCall, recorded_calls
from insitu.harness.rollouts.rollout import RolloutFigures
from insitu.types import Ending
from insitu.workflow.outcome import Outcome

_PAUSES_SECONDS = (0.05, 0.2, 0.5, 1.5)
"""The record of a call whose client has just disconnected takes a moment to be written."""


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """Every call of a rollout, and the subset to train on."""

    calls: Sequence[RecordedCall] = ()
    call_ids: Sequence[str] = ()
    """The calls to train on, in order."""
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why each of the other calls is dropped, by call id."""
    capture: Capture = field(default_factory=Capture)
    why_none: str = ""
    """Explanation for the user in case there is nothing to train on."""
    why_partial: str = ""
    """Why calls of the rollout may be missing without a trace; empty if all were counted."""
    num_failed: int = 0
    """Calls that an engine or the gateway failed to answer, or not to the end."""

    @property
    def why_not_the_policy(self) -> str:
        """Say why a failed rollout must not be blamed on the policy; empty if it may."""
        if self.num_failed:
            return f"{self.num_failed} of its model calls failed in the engine or the gateway"
        return self.why_partial if self.call_ids else "it has no call to train on"

    @property
    def chosen(self) -> list[RecordedCall]:
        """The calls to train on."""
        return [call for call in self.calls if call["id"] not in self.dropped]

    def corrected(self, outcome: Outcome) -> Outcome:
        """Correct a completed outcome: it must have used the trained model and be on record as a whole.

        One that was cut off ends in LENGTH.
        """
        if outcome.ending is not Ending.COMPLETED:
            return outcome
        if not self.call_ids:
            return replace(outcome, ending=Ending.INFRASTRUCTURE, reason=self.why_none)
        if self.why_partial:
            return replace(outcome, ending=Ending.INFRASTRUCTURE, reason=self.why_partial)
        if self.chosen[-1]["finish_reason"] == "length":
            return replace(outcome, ending=Ending.LENGTH)
        return outcome

    @property
    def figures(self) -> RolloutFigures:
        """Counts over the calls."""
        return RolloutFigures(
            num_calls=len(self.calls),
            num_output_tokens=sum(call["num_output_tokens"] for call in self.calls),
            policy_steps=tuple(sorted({call["policy_step"] for call in self.chosen})),
            capture=self.capture,
            temperature=_mean_temperature(self.chosen),
        )


def _mean_temperature(calls: Sequence[RecordedCall]) -> float | None:
    sent = [call.get("sampling", {}).get("temperature") for call in calls]
    known = [float(each) for each in sent if isinstance(each, int | float)]
    return sum(known) / len(known) if known else None


async def read_rollout(
    gateway: GatewayClient, targets: Targets, rollout_id: str, before: RecordedCalls | None = None
) -> RecordedCalls:
    """Read the calls recorded so far. Calls made since `before`, if given, are never trained on."""
    record = await _settled(gateway, rollout_id)
    calls = recorded_calls(record.calls)
    call_ids = before.call_ids if before else [call["id"] for call in targets.chosen(calls)]
    others = [call for call in calls if call["id"] not in set(call_ids)]
    dropped = {call["id"]: targets.dropped_as(call) or LATE for call in others}
    why_none = targets.why_none(calls, record.unrecorded)
    capture = _capture(record, dropped)
    num_failed = record.unrecorded.get("failed", 0) + sum(call["finish_reason"] == "broken" for call in calls)
    return RecordedCalls(calls, call_ids, dropped, capture, why_none, _why_partial(record), num_failed)


def _why_partial(record: RolloutRecord) -> str:
    """Say why calls may be missing without a trace; empty if the gateway has counted them all."""
    if record.seen is not None:
        return ""
    return "the gateway was restarted during the rollout and cannot tell whether calls of it are missing"


async def _settled(gateway: GatewayClient, rollout_id: str) -> RolloutRecord:
    """Read the record; poll for a while if calls are in flight or not written yet."""
    record = await gateway.rollout_record(rollout_id)
    for pause in _PAUSES_SECONDS:
        if record.under_way == 0 and _num_missing(record) == 0:
            break
        await asyncio.sleep(pause)
        record = await gateway.rollout_record(rollout_id)
    return record


def _capture(record: RolloutRecord, reasons: Mapping[str, str]) -> Capture:
    kinds = Counter(reasons.values())
    num_unrecorded = sum(record.unrecorded.values())
    dropped = {
        INCOMPLETE_CALL: kinds[INCOMPLETE_CALL],
        LATE: kinds[LATE],
        UNRECORDED: num_unrecorded,
        UNFINISHED: record.under_way,
    }
    num_known = len(record.calls) + num_unrecorded + record.under_way
    return Capture(
        seen=record.seen or 0,
        uncounted=num_known if record.seen is None else 0,
        trained=len(record.calls) - len(reasons),
        context_only={kind: kinds[kind] for kind in (OTHER_MODEL, OTHER_FUNCTION) if kinds[kind]},
        dropped={reason: count for reason, count in dropped.items() if count},
    )


def _num_missing(record: RolloutRecord) -> int:
    if record.seen is None:
        return 0
    return record.seen - len(record.calls) - sum(record.unrecorded.values()) - record.under_way
