"""Judge the runs of the evidence again, step by step, and print the verdicts beside what happened later.

    python benchmarks/rejudge.py DIRECTORY...     # run directories, such as those that evidence.py leaves
    python benchmarks/rejudge.py                  # the curves of benchmarks/results, which know no examples

One line a run: its rewards, the verdict after each step (. too early, + learning, = level, - not learning,
v falling, o overfitting), and the held-out reward before and after.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from insitu.harness.files.metrics import StepLine  # noqa: E402
from insitu.harness.verdicts.run_settings import RunSettings  # noqa: E402
from insitu.harness.verdicts.verdict import with_verdict  # noqa: E402

SIGNS: dict[str, str] = dict(
    zip(
        ("too_early", "learning", "level", "not_learning", "falling", "overfitting"),
        ".+=-vo",
        strict=True,
    )
)


def main() -> None:
    directories = [Path(name) for name in sys.argv[1:]]
    if directories:
        for directory in directories:
            show(directory.parent.name, of_directory(directory), *held_out(directory))
        return
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        sides = [result.get(side, {}).get("reward") for side in ("before", "after")]
        show(path.stem, of_curve(result["curve"]), *sides)


def of_directory(directory: Path) -> list[StepLine]:
    """Return the lines of a run, with the rewards of its examples from the rollouts on file."""
    lines = [json.loads(line) for line in (directory / "steps.jsonl").read_bytes().splitlines()]
    for line in lines:
        name = f"epoch-{line['epoch']:04d}-step-{line['step_of_epoch']:04d}.jsonl"
        rewards: dict[str, list[float | None]] = defaultdict(list)
        for text in (directory / "trajectories" / name).read_bytes().splitlines():
            rollout = json.loads(text)
            rewards[rollout["example_id"]].append(rollout["reward"])
        line["group_rewards"] = {example: _group(found) for example, found in rewards.items()}
    return lines


def _group(rewards: list[float | None]) -> dict[str, Any]:
    known = [each for each in rewards if each is not None]
    mean = sum(known) / len(known) if known else None
    return {"mean": mean, "num_rewarded": len(known), "num_failed": len(rewards) - len(known)}


def of_curve(curve: list[dict[str, Any]]) -> list[StepLine]:
    """Return lines with the mean rewards alone; rewards of these tasks lie between 0 and 1."""
    lines = [
        {
            "epoch": 0,
            "step": point["step"],
            "avg_reward": point["reward"],
            "min_reward": 0.0,
            "max_reward": 1.0,
            "num_rewarded": point["rollouts"],
            "filtered_num_trajectories": point["rollouts"],
            "filtered_avg_reward": point["reward"],
            "training": {"updated": float(point["step"] is not None)},
        }
        for point in curve
    ]
    return cast("list[StepLine]", lines)


def held_out(directory: Path) -> tuple[float | None, float | None]:
    """Return the held-out reward of the first and of the last validation."""
    history = json.loads((directory / "validation_history.json").read_text())
    own = [entry["avg_reward"] for entry in history if not entry.get("remeasured")]
    return own[0], own[-1]


def show(name: str, lines: list[StepLine], before: float | None, after: float | None) -> None:
    """Judge and print a run."""
    settings = RunSettings(len(lines), "player", "groups", "backend", "score", "output")
    done: list[StepLine] = []
    for line in lines:
        bare = cast(StepLine, {key: value for key, value in line.items() if key != "verdict"})
        done.append(with_verdict(done, bare, settings))
    verdicts = [line.get("verdict") for line in done]
    signs = "".join(SIGNS[verdict["code"]] for verdict in verdicts if verdict)
    causes = sorted({cause for verdict in verdicts if verdict for cause in verdict["causes"]})
    rewards = " ".join(f"{line['avg_reward']:.2f}" for line in done if line["avg_reward"] is not None)
    ends = "" if before is None or after is None else f"held out {before:.2f} -> {after:.2f}"
    print(f"{name:<18}{signs:<26}{ends}  {', '.join(causes)}\n                  {rewards}")


if __name__ == "__main__":
    main()
