"""Results: what a part measured, read from the files of its run."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from insitu.harness.gains.gain import compare
from insitu.harness.gains.measurement import Measurement

Line = dict[str, Any]
SIZES = (2, 4, 8)
"""Numbers of generations to compare."""


def read_lines(path: Path) -> list[Line]:
    """Read a file of JSON lines."""
    # Bytes: sampled text may hold characters that `str.splitlines` takes for an end of line.
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def validations(output: Path) -> list[Line]:
    """Return the validations of a run in order, without the second measurement of its best step."""
    path = output / "validation_history.json"
    history = json.loads(path.read_text()) if path.exists() else []
    return [entry for entry in history if not entry.get("remeasured")]


def held_out(output: Path, entry: Line) -> dict[str, Any]:
    """Return success and the task's other figures in a validation."""
    side = _side(read_lines(_validation_file(output, entry)))
    return {"step": entry["step"], "reward": entry["avg_reward"], **side}


def greedy(folder: Path) -> dict[str, Any]:
    """Return what `insitu eval` at temperature 0 measured of both models, in the order of its arguments."""
    sides = [_side(read_lines(path)) for path in sorted(folder.glob("[12]-*.jsonl"))]
    return dict(zip(("before", "after"), sides, strict=True))


def _side(lines: Sequence[Line]) -> dict[str, Any]:
    scored = [line for line in lines if line["reward"] is not None]
    success = _success(scored)
    return {
        "success": success.mean,
        "standard_error": success.standard_error,
        "figures": figures(scored),
        "num_examples": len(success.rewards),
        "num_rollouts": len(lines),
        "num_failed": len(lines) - len(scored),
    }


def _validation_file(output: Path, entry: Line) -> Path:
    name = f"validation-{entry['epoch']:04d}"
    if "pass_share" in entry:
        name += f"-step-{entry['step']:06d}"
    return output / "trajectories" / f"{name}.jsonl"


def _success(lines: Sequence[Line]) -> Measurement:
    return Measurement.of((line["example_id"], line["reasoning"]["success"]) for line in lines)


def figures(lines: Sequence[Line]) -> dict[str, float]:
    """Return the mean of each figure that the task's reward reports, over rollouts."""
    names = lines[0]["reasoning"] if lines else {}
    return {name: statistics.fmean(line["reasoning"][name] for line in lines) for name in names}


def curve(output: Path) -> list[dict[str, Any]]:
    """Return a point for each step: mean reward and figures of its rollouts, before its update."""
    points: list[dict[str, Any]] = []
    path = output / "steps.jsonl"
    for line in read_lines(path) if path.exists() else []:
        name = f"epoch-{line['epoch']:04d}-step-{line['step_of_epoch']:04d}.jsonl"
        rollouts = [each for each in read_lines(output / "trajectories" / name) if each["reward"] is not None]
        training = line.get("training") or {}
        points.append(
            {
                "step": line["step"],
                "reward": line["avg_reward"],
                **figures(rollouts),
                "spread": {size: spread(rollouts, size) for size in SIZES},
                "rollouts": line["num_trajectories"],
                "truncated": line["num_truncated"],
                "entropy": training.get("entropy"),
                "zero_variance": training.get("account/zero_variance"),
                "train_seconds": training.get("time/train_seconds"),
                "timestamp": line["timestamp"],
            }
        )
    return points


def spread(rollouts: Sequence[Line], size: int) -> float | None:
    """Return the share of groups whose rewards would differ with `size` generations, drawn from those made.

    Without a difference a group teaches nothing. None if no group has so many rollouts.
    """
    groups: dict[str, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout["example_id"], []).append(rollout["reward"])
    equal = [
        sum(math.comb(count, size) for count in Counter(rewards).values()) / math.comb(len(rewards), size)
        for rewards in groups.values()
        if len(rewards) >= size
    ]
    return 1 - statistics.fmean(equal) if equal else None


def result_of(output: Path) -> dict[str, Any]:
    """Return everything measured so far; `after` and `gain` are those of the last step, not of the best."""
    history = validations(output)
    points = curve(output)
    result: dict[str, Any] = {"curve": points, "rollouts": sum(point["rollouts"] for point in points)}
    if history:
        result["before"] = held_out(output, history[0])
        result["held_out"] = [held_out(output, entry) for entry in history]
    if len(history) > 1:
        result["after"] = held_out(output, history[-1])
        first, last = (_success(_scored(output, entry)) for entry in (history[0], history[-1]))
        gain = compare(first, last)
        result["gain"] = gain.to_dict() if gain else None
        result["sentence"] = gain.sentence("before", "after") if gain else "Nothing can be compared."
    return result


def _scored(output: Path, entry: Line) -> list[Line]:
    return [line for line in read_lines(_validation_file(output, entry)) if line["reward"] is not None]
