"""Re-sampling: go on from a fork of a group's tree, with the base model or any kept step."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import InsituError, InvalidRequest, NotFound
from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.harness.trial.resampling import Continuation, NextToken, ResampleRequest, resample
from insitu.harness.trial.rescoring import AskedRollout, NewScore
from insitu.json_values import JsonValue
from insitu.view.answers.rescoring import Rescoring, alone, asked_of
from insitu.view.answers.sequences import sequences_of, shown_calls
from insitu.view.answers.stored import StoredRollout, find_rollouts
from insitu.view.run import ViewedRun
from insitu.view.texts import TokenNames
from insitu.wire.views.groups import ResampledBranch, ResampledFork

MOST_AT_ONCE = 8
MOST_TOKENS = 4_096
_SECONDS = 120.0
_MOST_SIBLINGS = 64
_WHOLE: Mapping[str, tuple[JsonValue, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}
"""Sampling from the whole distribution: a recorded score then depends on nothing but the ids before it."""
_UNSCORED = (
    "The next tokens were not scored again: that takes two siblings who drew different ones from the whole "
    "distribution of these very weights."
)


@dataclass(frozen=True, slots=True)
class Fork:
    """A place of the tree: the first `depth` tokens of one sequence of a rollout."""

    rollout_id: str
    sequence: int
    depth: int


@dataclass(frozen=True, slots=True)
class _Next:
    """A sibling that sampled a token right after the ids of a fork."""

    found: StoredRollout
    calls: Sequence[RecordedCall]
    call: RecordedCall
    place: int
    """Of that token in the answer of `call`."""

    def token(self, temperature: JsonValue) -> NextToken | None:
        """Return the token with its score; None if another distribution than the whole one was sampled."""
        sampling, logprobs = self.call.get("sampling", {}), self.call.get("logprobs", [])
        whole = all(sampling.get(name) in neutral for name, neutral in _WHOLE.items())
        if not whole or sampling.get("temperature") != temperature or self.call.get("constrained"):
            return None
        if self.place >= len(logprobs):
            return None
        ids = self.call.get("output_ids", [])
        return NextToken(
            id=ids[self.place], logprob=logprobs[self.place], version=self.call["policy_version"]
        )

    def text_before(self, names: TokenNames) -> str | None:
        """Return the answer's text up to the fork; None if a reward saw something else than the answer."""
        answer, output = self.call.get("answer") or {}, self.found.rollout.details().output
        content = answer.get("content", answer.get("text"))
        if self.call["id"] != self.calls[-1]["id"] or not isinstance(content, str) or output != content:
            return None
        texts = names.texts(self.call.get("output_ids", []))
        parsed = any(answer.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
        if texts is None or parsed or not "".join(texts).startswith(content):
            return None
        before = "".join(texts[: self.place])
        return before if content.startswith(before) else None


class Resampling:
    """Goes on from forks, one at a time, with the backend of `config_file`."""

    def __init__(self, config_file: Path | None, rescoring: Rescoring) -> None:
        self._config_file = config_file
        self._rescoring = rescoring
        self._busy = threading.Lock()

    def fork(
        self,
        run: ViewedRun,
        store: str,
        index: int,
        fork: Fork,
        step: int | None,
        count: int,
        max_tokens: int,
    ) -> ResampledFork:
        """Sample `count` answers from a fork, by a step or (None) by the base model; nothing is kept."""
        if self._config_file is None:
            raise InvalidRequest(
                f"{run.path} names no backend with a key: a run directory keeps no secrets",
                hint="start insitu view with the configuration: insitu view config.yml",
            )
        hint = f"wait for it, at most {_SECONDS:g} s"
        with alone(self._busy, "another fork is being continued", hint=hint):
            ids, nexts = _place(run, store, index, fork)
            first = nexts[0]
            sampling = first.call.get("sampling", {})
            tokens = [each.token(sampling.get("temperature")) for each in nexts]
            answer = resample(
                ResampleRequest(
                    config_file=str(self._config_file),
                    run=str(run.files.backend.get("name") or ""),
                    step=step,
                    prompt_ids=ids,
                    sampling=sampling,
                    count=count,
                    max_tokens=max_tokens,
                    next_tokens=[token for token in tokens if token is not None],
                    seconds=_SECONDS,
                )
            )
            scores, reward_note = self._scores(run, nexts, answer.continuations)
            scored = zip(answer.continuations, scores, strict=True)
            note = _UNSCORED if answer.score_gap is None else ""
            if first.call.get("constrained"):
                note = "The recorded answer was constrained by a grammar or a list of tokens; these are not."
            return ResampledFork(
                rollout_id=fork.rollout_id,
                sequence=fork.sequence,
                depth=fork.depth,
                step=step,
                model=answer.model,
                version=answer.version,
                branches=[_branch(run, each, score) for each, score in scored],
                score_gap=answer.score_gap,
                note=note,
                reward_note=reward_note,
            )

    def _scores(
        self, run: ViewedRun, nexts: Sequence[_Next], continuations: Sequence[Continuation]
    ) -> tuple[Sequence[NewScore | None], str]:
        """Score the continuations as recorded rollouts are scored again; without scores, say why."""
        nothing: list[NewScore | None] = [None] * len(continuations)
        texts = ((each, each.text_before(run.names)) for each in nexts)
        found = next(((each, text) for each, text in texts if text is not None), None)
        if found is None:
            return nothing, (
                "Not scored: the agent makes something else of this answer than its output, or the text of "
                "the tokens is not known here."
            )
        source, before = found
        asked = [_asked(source, each, before + each.text) for each in continuations]
        try:
            return self._rescoring.scores(run, source.found, asked), ""
        except InsituError as error:
            return nothing, f"Not scored: {error.message}"


@dataclass(frozen=True, slots=True)
class BesideAgent:
    """The two actions of a server that runs where the agent does."""

    rescoring: Rescoring
    resampling: Resampling
    configured: bool
    """True if both can be done: a run directory keeps no key, and what it names is not executed."""

    @classmethod
    def of(cls, config_file: Path | None) -> BesideAgent:
        """`config_file`: the one that the user named, if any."""
        rescoring = Rescoring(config_file)
        return cls(rescoring, Resampling(config_file, rescoring), config_file is not None)


def _place(run: ViewedRun, store: str, index: int, fork: Fork) -> tuple[list[int], list[_Next]]:
    """Return the ids of a fork, and who went on from there; the named rollout first, if it did."""
    found = find_rollouts(
        run,
        "s.name = ? AND r.position = ? ORDER BY r.rollout_id != ?, r.generation, r.id LIMIT ?",
        [store, index, fork.rollout_id, _MOST_SIBLINGS],
    )
    if not found or found[0].row.rollout_id != fork.rollout_id:
        raise NotFound(f"{store} has no rollout {fork.rollout_id!r} of example {index}")
    shown = [(each, shown_calls(each.details()[0], each.rollout)) for each in found]
    paths = [(each, calls, path) for each, calls in shown for path in sequences_of(calls)]
    own = [path for each, _, path in paths if each is found[0]]
    if fork.sequence >= len(own) or not 0 < fork.depth <= len(own[fork.sequence].ids):
        raise NotFound(
            f"rollout {fork.rollout_id!r} has no {fork.depth} recorded tokens in sequence {fork.sequence}"
        )
    ids = own[fork.sequence].ids[: fork.depth]
    nexts = [
        _Next(each, calls, next(call for call in calls if call["id"] == sampled[0]), sampled[1])
        for each, calls, path in paths
        if path.ids[: fork.depth] == ids and (sampled := path.sampled_at(fork.depth)) is not None
    ]
    if not nexts:
        raise InvalidRequest(
            f"no sibling sampled a token after the first {fork.depth} ids: what follows was read, or nothing",
            hint="choose a fork within an answer",
        )
    return ids, nexts


def _asked(source: _Next, continuation: Continuation, text: str) -> AskedRollout:
    """Return the rollout as if its last answer had been this one."""
    asked, said = asked_of(source.found), source.call.get("answer") or {}
    last = next(call for call in asked.calls if call["id"] == source.call["id"])
    last["answer"] = said | {"content" if "content" in said else "text": text}
    last["finish_reason"] = continuation.finish_reason
    return asked.model_copy(update={"output": text})


def _branch(run: ViewedRun, continuation: Continuation, score: NewScore | None) -> ResampledBranch:
    return ResampledBranch(
        call_id=continuation.call_id,
        ids=continuation.output_ids,
        texts=run.names.texts(continuation.output_ids) or continuation.pieces,
        logprobs=continuation.logprobs,
        finish_reason=continuation.finish_reason,
        text=continuation.text,
        reward=None if score is None else score.score,
        error=None if score is None else score.error,
    )
