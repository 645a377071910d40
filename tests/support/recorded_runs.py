"""Recorded runs: the figures of real steps, for tests of the verdict.

`tests/fixtures/verdicts/README.md` says how each was made. Only what the verdict reads is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from insitu.harness.files.metrics import StepLine
from insitu.harness.verdicts.run_settings import RunSettings
from insitu.harness.verdicts.verdict import with_verdict

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "verdicts"
SETTINGS = RunSettings(
    planned_updates=25,
    llm="adder",
    builder="groups",
    adapter="backend",
    evaluator="exact",
    output_dir="output",
)
_KEPT = (
    *("epoch", "step", "avg_reward", "min_reward", "max_reward", "num_rewarded", "num_truncated"),
    *("temperature", "filtered_num_trajectories", "filtered_avg_reward"),
)
_ACCOUNT = ("total", "trained", "truncated", "dropped", "endings")
_TRAINING = ("updated", "skipped", "entropy", "mismatch/kl", "probe/applied", "probe/can_tell")


def slim(line: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line that the verdict reads."""
    kept = {name: line.get(name) for name in _KEPT} | {
        "account": {name: line["account"][name] for name in _ACCOUNT}
    }
    if line.get("training"):
        found = {
            name: value
            for name, value in line["training"].items()
            if name in _TRAINING or name.startswith("sampling/") or name == "account/calls_trained"
        }
        kept["training"] = {name: round(value, 6) for name, value in found.items()}
    return kept


def write_run(name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / f"{name}.jsonl").write_text("".join(json.dumps(slim(line)) + "\n" for line in lines))


def read_run(name: str) -> list[StepLine]:
    return [cast(StepLine, json.loads(line)) for line in (RUNS / f"{name}.jsonl").read_text().splitlines()]


def judged(lines: Sequence[StepLine], settings: RunSettings = SETTINGS) -> list[StepLine]:
    """The lines with their verdicts, one after the other as a run gives them."""
    done: list[StepLine] = []
    for line in lines:
        done.append(with_verdict(done, line, settings))
    return done
