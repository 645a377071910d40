"""Alarms: the causes that the verdicts of a run name, from their first step to their last."""

from __future__ import annotations

import math
from collections.abc import Sequence

from insitu.harness.files.metrics import StepLine
from insitu.harness.verdicts.alarms import RULE_BY_NAME, causes, tell
from insitu.harness.verdicts.rules import Rule
from insitu.harness.verdicts.run_settings import RunSettings
from insitu.json_values import as_object
from insitu.view.reading.run_files import RunFiles, section
from insitu.view.run import ViewedRun
from insitu.wire.views.runs import Alarm, AlarmList

_UNKNOWN = "<name>"
_MAX_FAILURES = 100
_GIVEN = ("sft", "dpo")


def alarms_of(run: ViewedRun) -> AlarmList:
    """Return the alarms of a run, and the jobs that failed."""
    return run.with_files(_alarms)


def _alarms(files: RunFiles) -> AlarmList:
    lines = files.steps()
    settings = run_settings(files)
    numbers = files.step_numbers()
    places: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        for cause in causes(line):
            places.setdefault(cause, []).append(place)
    alarms = [_alarm(RULE_BY_NAME[name], lines, numbers, held, settings) for name, held in places.items()]
    alarms.sort(key=lambda alarm: (not alarm.active, -alarm.last_step))
    failed = [record for record in files.journal() if record.get("event") == "failed"]
    failures = [f"epoch {record.get('epoch')}: {record.get('message') or 'no reason'}" for record in failed]
    return AlarmList(alarms, failures[-_MAX_FAILURES:])


def _alarm(
    rule: Rule,
    lines: Sequence[StepLine],
    numbers: Sequence[int],
    held: Sequence[int],
    settings: RunSettings,
) -> Alarm:
    """Tell an alarm with the figures of the last step where it held; the stretch before it counts."""
    first = last = held[-1]
    for place in reversed(held):
        if place < first - 1:
            break
        first = place
    told = tell(rule, lines[: last + 1], settings)
    return Alarm(
        rule=rule.name,
        active=last == len(lines) - 1,
        first_step=numbers[first],
        last_step=numbers[last],
        sentence=told.sentence,
        setting=told.setting,
        source=rule.source,
    )


def run_settings(files: RunFiles) -> RunSettings:
    """Read the settings that verdicts name from a stored configuration."""
    finetuning = section(files.config, "finetuning")
    per_step, examples = finetuning.get("groups_per_step"), files.num_examples()
    epochs = finetuning.get("num_epochs")
    steps = math.ceil(examples / per_step) if isinstance(per_step, int) and examples else 1
    planned = (epochs if isinstance(epochs, int) else 1) * steps
    most = finetuning.get("max_steps")
    reward = as_object(finetuning.get("reward_function")) or {}
    method = "grpo" if files.settings is None else files.settings.method
    return RunSettings(
        planned_updates=min(planned, most) if isinstance(most, int) else planned,
        llm=next(iter(section(files.config, "llms")), _UNKNOWN),
        builder=str(finetuning.get("trajectory_builder") or _UNKNOWN),
        adapter=str(finetuning.get("trainer_adapter") or _UNKNOWN),
        evaluator=str(reward.get("name") or _UNKNOWN),
        output_dir=str(files.path),
        method=method,
        given=method in _GIVEN,
    )
