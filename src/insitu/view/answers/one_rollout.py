"""One rollout in full: its conversation, its calls with their tokens, its siblings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.harness.files.trained_tokens import TrainedCall
from insitu.harness.rollouts.capture import OTHER_FUNCTION, OTHER_MODEL
from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.harness.rollouts.rollout import Rollout, RolloutDetails
from insitu.json_values import JsonObject, as_object
from insitu.user_traceback import UserTraceback
from insitu.view.answers.stored import StoredRollout, find_rollout, judged_group, trained_calls
from insitu.view.reading.fates import Judged, basis_of
from insitu.view.reading.query import Filters, rollout_page
from insitu.view.run import ViewedRun
from insitu.wire.views.rollouts import (
    AdvantageBasis,
    CallFate,
    CallView,
    RolloutRow,
    RolloutView,
    Sibling,
    TokenColumn,
    TracebackView,
)

MAX_CALLS = 500
_MAX_SIBLINGS = 200
_CONTEXT = (OTHER_MODEL, OTHER_FUNCTION)


@dataclass(frozen=True, slots=True)
class CallFates:
    """The fate of each call of a rollout."""

    row: RolloutRow
    rollout: Rollout
    details: RolloutDetails
    judged: Judged | None

    def of(self, call_id: str) -> tuple[CallFate, str | None, float | None]:
        """Return fate, reason and advantage of the tokens that a call sampled."""
        place = self.place(call_id)
        if place is None:
            reason = self.details.dropped.get(call_id, "not_selected")
            return ("context" if reason in _CONTEXT else "dropped"), reason, None
        if self.judged is None:
            return self.row.fate, self.row.reason, None
        advantages = self.judged.advantages
        advantage = None if advantages is None or place >= len(advantages) else advantages[place]
        if self.judged.fate == "trained" and (reason := (self.judged.dropped_calls or {}).get(place)):
            return "dropped", reason, advantage
        return self.judged.fate, self.judged.reason, advantage

    def place(self, call_id: str) -> int | None:
        """Return the position of a call among those to train on."""
        return list(self.rollout.call_ids).index(call_id) if call_id in self.rollout.call_ids else None


def rollout_view(run: ViewedRun, rollout_id: str, *, tokens: bool = True) -> RolloutView:
    """Return everything about one rollout."""
    found = find_rollout(run, rollout_id)
    details, problem = found.details()
    judged = judged_group(run, found.row.store, found.row.index)
    fates = CallFates(found.row, found.rollout, details, judged.get(rollout_id))
    trained: Mapping[str, TrainedCall] = {}
    if tokens:
        trained = trained_calls(run, found.row.store, found.row.index)
    calls = [_call(run, fates, call, trained, tokens=tokens) for call in details.calls[:MAX_CALLS]]
    capture = found.rollout.figures.capture
    return RolloutView(
        row=found.row,
        input=details.input,  # pyright: ignore[reportArgumentType] - JSON, as it was stored
        expected=details.expected,  # pyright: ignore[reportArgumentType]
        output=details.output,  # pyright: ignore[reportArgumentType]
        reasoning=details.reasoning,  # pyright: ignore[reportArgumentType]
        reward_parts=found.rollout.figures.components,
        calls=calls,
        num_calls_left_out=max(0, len(details.calls) - MAX_CALLS),
        capture=as_object(capture.to_dict()) if capture else None,
        traceback=_traceback(details.traceback),
        siblings=_siblings(run, found),
        basis=run_basis(run, found.row),
        tokens_problem=problem or _no_tokens(details.calls),
    )


def run_basis(run: ViewedRun, row: RolloutRow) -> AdvantageBasis:
    """Return how the advantages of a rollout's group are computed."""
    return basis_of(run.files.settings) if row.fate in ("trained", "dropped") else "none"


def _call(
    run: ViewedRun,
    fates: CallFates,
    call: RecordedCall,
    trained: Mapping[str, TrainedCall],
    *,
    tokens: bool,
) -> CallView:
    fate, reason, advantage = fates.of(call["id"])
    rewards, place = fates.rollout.call_rewards, fates.place(call["id"])
    prompt, output = call.get("prompt_ids"), call.get("output_ids")
    extra: JsonObject = dict(call)  # pyright: ignore[reportAssignmentType] - JSON, as it was stored
    shared_tokens, shared_messages = extra.get("shared_tokens"), extra.get("shared_messages")
    parent, started = extra.get("parent_id"), extra.get("started_at")
    return CallView(
        id=call["id"],
        model=call["model"],
        function=call.get("function"),
        policy_step=call["policy_step"],
        policy_version=call["policy_version"],
        finish_reason=call["finish_reason"],
        constrained=call.get("constrained", False),
        parent_id=parent if isinstance(parent, str) else None,
        shared_tokens=shared_tokens if isinstance(shared_tokens, int) else 0,
        shared_messages=shared_messages if isinstance(shared_messages, int) else 0,
        fate=fate,
        reason=reason,
        advantage=advantage,
        call_reward=None if rewards is None or place is None else rewards[place],
        messages=call.get("messages") or [],
        answer=call.get("answer"),
        tools=call.get("tools"),
        sampling=call.get("sampling") or {},
        timings=call.get("timings") or {},
        started_at=started if isinstance(started, int | float) else None,
        num_prompt_tokens=call.get("num_prompt_tokens", len(prompt or [])),
        num_output_tokens=call.get("num_output_tokens", len(output or [])),
        prompt=_column(run, call, prompt, None) if tokens else None,
        output=_column(run, call, output, call.get("logprobs"), trained.get(call["id"])) if tokens else None,
    )


def _column(
    run: ViewedRun,
    call: RecordedCall,
    ids: list[int] | None,
    logprobs: list[float] | None,
    trained: TrainedCall | None = None,
) -> TokenColumn | None:
    if ids is None:
        return None
    # Another model has another tokenizer.
    known = call.get("run") is not None or call["model"] == run.files.backend.get("base_model")
    own: list[float] | None = None
    if trained is not None and len(trained.logprobs) == len(ids):
        own = trained.logprobs.tolist()
    return TokenColumn(ids, run.names.texts(ids) if known else None, logprobs, own)


def _siblings(run: ViewedRun, found: StoredRollout) -> list[Sibling]:
    filters = Filters(store=found.row.store, index=found.row.index)
    page = run.index.read(lambda db: rollout_page(db, filters, "oldest", None, _MAX_SIBLINGS))
    return [
        Sibling(
            each.rollout_id, each.generation, each.reward, each.advantage, each.ending, each.fate, each.reason
        )
        for each in page.rows
    ]


def _traceback(raised: UserTraceback | None) -> TracebackView | None:
    return None if raised is None else TracebackView(raised.text, raised.error, list(raised.frames))


def _no_tokens(calls: Sequence[RecordedCall]) -> str:
    if not calls:
        return "no model call of it is on record"
    if not any("output_ids" in call for call in calls):
        return "the record of its calls has no token ids"
    return ""
