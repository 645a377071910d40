"""InputChanges: what was edited between two commands of one run, and what of the run that outdates.

nothing trained yet ──► go on: rollouts of the old inputs are set aside, the epochs begin anew
trained             ──► reject, or with `--accept-changes` go on: set aside the unfinished step, and
                        measure anew what validations compare
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from insitu.config.curriculum import CurriculumConfig
from insitu.errors import Conflict
from insitu.harness.files.run_directory import EPOCH_NAME, RunDirectory, epoch_name
from insitu.harness.interfaces import events
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run_input import SHAPE_ROLLOUTS, SHAPE_VALIDATIONS, Role, RunInput
from insitu.harness.loop.curriculum import initial_state
from insitu.harness.loop.state import LoopState, fold

OUTDATED = "outdated"
_VALIDATION_NAME = re.compile(r"validation-\d+(-step-\d+)?|remeasured-\d+")


@dataclass(frozen=True, slots=True)
class InputChanges:
    """The inputs of a run as they are now, beside those that its journal names."""

    directory: RunDirectory
    curriculum: CurriculumConfig
    inputs: Sequence[RunInput]

    def settle(self, progress: Progress, command: str, *, accept: bool) -> None:
        """Take the inputs as they are, or raise Conflict; `command` repeats the run and accepts changes."""
        past = events.read(self.directory.journal)
        state = fold(past, self.curriculum)
        noted = [event for event in past if isinstance(event, events.InputsNoted)]
        before = {(each.role, each.name): each for each in noted[-1].inputs} if noted else {}
        changed = [
            each
            for each in self.inputs
            if (each.role, each.name) in before and before[each.role, each.name].sha256 != each.sha256
        ]
        lines = [each.difference(before[each.role, each.name]) for each in changed]
        roles = frozenset(each.role for each in changed)
        trained = state.num_updates or state.submitted
        if state.ended and not trained:  # whatever the cause was, only new rollouts show that it is gone
            self._begin_anew(frozenset(Role), lines or ["no epoch has trained anything"], progress)
        elif changed and not trained:
            self._begin_anew(roles, lines, progress)
        elif changed:
            if not accept:
                raise self._refusal(state, lines, command)
            self._go_on(state, roles)
            progress.info(f"Going on with changed inputs: {'; '.join(lines)}")
        elif state.outdated and state.submitted is None:  # it failed after the change was accepted
            self._set_aside_step(state)
        elif before.keys() == {(each.role, each.name) for each in self.inputs}:
            return
        events.note(self.directory.journal, events.InputsNoted(list(self.inputs), sorted(roles), lines))

    def _begin_anew(self, roles: frozenset[Role], lines: Sequence[str], progress: Progress) -> None:
        found = self._set_aside(_VALIDATION_NAME) if roles & SHAPE_VALIDATIONS else 0
        if roles & SHAPE_ROLLOUTS:
            found += self._set_aside(EPOCH_NAME) + self._set_ahead_aside()
            start = initial_state(self.curriculum)
            events.note(self.directory.journal, events.Restarted("; ".join(lines), start))
        aside = " (rollouts made before are kept aside)" if found else ""
        again = "Beginning anew" if roles & SHAPE_ROLLOUTS else "Validating anew"
        progress.info(f"{again}, as nothing has been trained yet{aside}: {'; '.join(lines)}")

    def _go_on(self, state: LoopState, roles: frozenset[Role]) -> None:
        if roles & SHAPE_ROLLOUTS:
            self._set_ahead_aside()
        if roles & SHAPE_ROLLOUTS and state.submitted is None:
            self._set_aside_step(state)
        if roles & SHAPE_VALIDATIONS:
            self._set_aside(_VALIDATION_NAME)

    def _set_aside(self, pattern: re.Pattern[str]) -> int:
        names = [name for name in self.directory.store_names() if pattern.fullmatch(name)]
        for name in names:
            self.directory.set_aside(name, OUTDATED)
        return len(names)

    def _set_ahead_aside(self) -> int:
        slots = self.directory.ahead.found()
        self.directory.ahead.set_aside(slots, OUTDATED)
        return len(slots)

    def _set_aside_step(self, state: LoopState) -> None:
        """Set aside the rollouts of the step that is not over."""
        epoch, number = state.next_epoch, len(state.open_steps)
        names = {epoch_name(epoch, number), *([] if number else [epoch_name(epoch)])}
        for name in names & set(self.directory.store_names()):
            self.directory.set_aside(name, OUTDATED)

    def _refusal(self, state: LoopState, lines: Sequence[str], command: str) -> Conflict:
        listed = "\n".join(f"    {line}" for line in lines)
        how_far = f"trained up to step {state.step}" if state.step else "in training"
        return Conflict(
            f"the run in {self.directory.path} is {how_far} with something else:\n{listed}",
            hint=f"restore it; or go on with the changes: {command}; or begin a new run: "
            "-o finetuning.output_dir <directory>",
        )
