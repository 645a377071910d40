"""A group scored again with the reward as it is now, and the advantages that the trainer would compute."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from insitu.config.curriculum import CurriculumConfig
from insitu.errors import InvalidRequest, NotFound, Overloaded
from insitu.harness.loop.curriculum import COMPARED, CURRICULUM, SUBSAMPLE, SpreadRule, reasons_within
from insitu.harness.rollouts.recorded_call import complete
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.trial.rescoring import AskedRollout, NewScore, RescoreRequest, rescore
from insitu.types import SCORED, Ending, StepSettings
from insitu.view.answers.stored import GroupOfStep, StoredRollout, find_rollouts, group_of_step
from insitu.view.reading.fates import Judged, basis_of
from insitu.view.reading.run_files import section
from insitu.view.run import ViewedRun
from insitu.wire.views.groups import RescoredGroup, RescoredSibling

_SECONDS = 60.0
_AGAIN = frozenset({*SCORED, Ending.EVALUATOR_ERROR})
"""Endings of rollouts that a reward scores, or has failed to score."""
_BY_OTHERS = frozenset({CURRICULUM, SUBSAMPLE})
"""Reasons that depend on the other groups of the step."""


class Rescoring:
    """Scores groups again, one at a time, with the reward of the configuration that the user named.

    What a run directory names is never executed: whoever made the directory chose it.
    """

    def __init__(self, config_file: Path | None) -> None:
        self._config_file = config_file
        self.token = secrets.token_urlsafe(32)
        """A secret of this process: only its own pages may ask for a new score."""
        self._busy = threading.Lock()

    def group(self, run: ViewedRun, store: str, index: int) -> RescoredGroup:
        """Score the recorded rollouts of a group; nothing is kept."""
        with self._alone():
            return self._group(run, store, index)

    def scores(
        self, run: ViewedRun, example: StoredRollout, rollouts: Sequence[AskedRollout]
    ) -> list[NewScore]:
        """Score other rollouts of an example; nothing is kept."""
        with self._alone():
            return rescore(self._request(run, example, rollouts)).scores

    def _alone(self) -> AbstractContextManager[None]:
        return alone(self._busy, "another group is being scored", hint="wait for it, at most a minute")

    def _group(self, run: ViewedRun, store: str, index: int) -> RescoredGroup:
        found = find_rollouts(
            run, "s.name = ? AND r.position = ? ORDER BY r.generation, r.id", [store, index]
        )
        if not found:
            raise NotFound(f"{run.path} has no rollouts of example {index} in {store}")
        group = group_of_step(run, store, index)
        if group is None:
            raise InvalidRequest(
                f"{store} is not a training step whose groups have been selected",
                hint="only such groups have advantages",
            )
        scored = [each for each in found if each.rollout.ending in _AGAIN]
        if not scored:
            raise InvalidRequest("no rollout of this group can be scored: all have failed before the reward")
        answer = rescore(self._request(run, scored[0], [asked_of(each) for each in scored]))
        scores = dict(zip((each.row.rollout_id for each in scored), answer.scores, strict=True))
        before = group.judged(run.files.settings)
        after = _judged_again(run, group, [each.rollout for each in found], scores)
        return RescoredGroup(
            store=store,
            index=index,
            reward_function=answer.reward,
            siblings=[_sibling(each, before, after, scores) for each in found],
            basis=basis_of(run.files.settings),
            note=answer.note,
        )

    def _request(
        self, run: ViewedRun, example: StoredRollout, rollouts: Sequence[AskedRollout]
    ) -> RescoreRequest:
        if self._config_file is None:
            raise InvalidRequest(
                f"the reward that {run.path} names is not executed: whoever made the directory chose it",
                hint="start insitu view with your own configuration: insitu view config.yml",
            )
        details = example.rollout.details()
        return RescoreRequest(
            config_file=str(self._config_file),
            example_id=example.rollout.example_id,
            input=details.input,
            expected=details.expected,
            rollouts=list(rollouts),
            seconds=_SECONDS,
        )


@contextmanager
def alone(busy: threading.Lock, message: str, *, hint: str) -> Generator[None]:
    """Do one thing at a time; Overloaded while another is under way."""
    if not busy.acquire(blocking=False):
        raise Overloaded(message, hint=hint)
    try:
        yield
    finally:
        busy.release()


def asked_of(found: StoredRollout) -> AskedRollout:
    """Return a recorded rollout as a reward gets it."""
    details = found.rollout.details()
    return AskedRollout(
        rollout_id=found.row.rollout_id,
        output=details.output,
        calls=[dict(call) for call in complete(details.calls, tokens=False)],
        seconds=found.rollout.seconds,
    )


def _judged_again(
    run: ViewedRun, group: GroupOfStep, rollouts: Sequence[Rollout], scores: Mapping[str, NewScore]
) -> dict[str, Judged]:
    """Return the fates under the new rewards, by the harness's selection and the trainer's arithmetic."""
    new = [_scored(each, scores.get(each.rollout_id)) for each in rollouts]
    settings = run.files.settings
    curriculum = CurriculumConfig.model_validate(
        section(run.files.config, "finetuning", "curriculum_learning")
    )
    dropped = reasons_within(new, curriculum, _rule(settings))
    by_others = {each: why for each, why in group.dropped.items() if why in _BY_OTHERS}
    known = {each.rollout_id: each for each in new}
    members = [
        replace(
            member,
            reward=known[member.rollout_id].reward,
            ending=str(known[member.rollout_id].ending),
            call_rewards=known[member.rollout_id].call_rewards,
        )
        for member in group.members
    ]
    return replace(group, members=members, dropped=by_others | dropped).judged(settings)


def _scored(rollout: Rollout, score: NewScore | None) -> Rollout:
    if score is None:
        return rollout
    if rollout.ending is Ending.EVALUATOR_ERROR:
        calls = [call for call in rollout.details().calls if call["id"] in rollout.call_ids]
        cut = bool(calls) and calls[-1]["finish_reason"] == "length"
        rollout = replace(rollout, ending=Ending.LENGTH if cut else Ending.COMPLETED)
    return replace(rollout, reward=None).scored(score.result(rollout.example_id))


def _rule(settings: StepSettings | None) -> SpreadRule:
    """Return the rule of the backend's adapter; the default for an adapter of somebody else."""
    if settings is None:
        return COMPARED
    compares = settings.method in ("grpo", "dpo")
    return SpreadRule(compares, settings.trains_equal_groups, settings.min_reward)


def _sibling(
    found: StoredRollout,
    before: Mapping[str, Judged],
    after: Mapping[str, Judged],
    scores: Mapping[str, NewScore],
) -> RescoredSibling:
    rollout_id, score = found.row.rollout_id, scores.get(found.row.rollout_id)
    old, new = before[rollout_id], after[rollout_id]
    return RescoredSibling(
        rollout_id=rollout_id,
        generation=found.row.generation,
        reward=found.row.reward,
        new_reward=found.row.reward if score is None else score.score,
        advantage=old.advantage,
        new_advantage=new.advantage,
        new_advantages=None if new.advantages is None else list(new.advantages),
        fate=new.fate,
        reason=new.reason,
        error=None if score is None else score.error,
        frames=[] if score is None else score.frames,
    )
