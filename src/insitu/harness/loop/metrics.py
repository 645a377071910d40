"""Metrics: the files that people and their scripts read, derived from the journal's events.

They are rewritten in full each time, so that every epoch appears once, however often the run was interrupted.
"""

from __future__ import annotations

import statistics as figures
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from insitu.harness.files.run_directory import write_atomic
from insitu.harness.loop.curriculum import usable_reward
from insitu.harness.rollouts.episode import Trajectory

_STATISTICS = ("avg_reward", "min_reward", "max_reward", "num_trajectories", "num_groups")
_EPOCH_FIELDS = (
    "run_id",
    *_STATISTICS,
    *(f"filtered_{name}" for name in _STATISTICS),
    "curriculum_percentile",
    "curriculum_state",
    "account",
    "step",
)
_REWARD_FIELDS = ("epoch", "avg_reward", "min_reward", "max_reward", "filtered_avg_reward", "timestamp")
_VALIDATION_FIELDS = ("epoch", "step", "avg_reward", "num_examples", "num_failed", "endings", "timestamp")
_CURRICULUM_FIELDS = (
    "current_percentile",
    "last_expansion_epoch",
    "total_groups",
    "included_groups",
    "config",
)
_JOURNAL_FIELDS = frozenset({"event", "at"})


def statistics(groups: Sequence[Sequence[Trajectory]], prefix: str = "") -> dict[str, Any]:
    """Compute mean, min and max reward over the trajectories that have one (None if none has), and counts."""
    rewards = [reward for group in groups for t in group if (reward := usable_reward(t)) is not None]
    values = {
        "avg_reward": figures.mean(rewards) if rewards else None,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "num_trajectories": sum(map(len, groups)),
        "num_groups": sum(1 for group in groups if group),
    }
    return {f"{prefix}{name}": value for name, value in values.items()}


def write_metrics(
    directory: Path,
    epochs: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    curriculum: Mapping[str, Any],
) -> None:
    """Write the four files. The last of several records of one epoch (or validation) counts."""
    trained = _each_once(epochs, ("epoch",))
    checked = _each_once(validations, ("epoch", "step"))
    write_atomic(directory / "training_metrics.jsonl", b"".join(_line(_epoch(record)) for record in trained))
    _write_json(directory / "reward_history.json", [_pick(record, _REWARD_FIELDS) for record in trained])
    _write_json(
        directory / "validation_history.json", [_pick(record, _VALIDATION_FIELDS) for record in checked]
    )
    _write_json(directory / "curriculum_state.json", _pick(curriculum, _CURRICULUM_FIELDS))


def _each_once(records: Iterable[Mapping[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    last = {tuple(record.get(key) for key in keys): record for record in records}
    ordered = sorted(last.values(), key=lambda record: tuple(record.get(key) or 0 for key in keys))
    return [{**record, "timestamp": _timestamp(record)} for record in ordered]


def _timestamp(record: Mapping[str, Any]) -> str | None:
    """Return the time in ISO 8601, from the record itself or from its journal entry."""
    if "timestamp" in record:
        return record["timestamp"]
    at = record.get("at")
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _epoch(record: Mapping[str, Any]) -> dict[str, Any]:
    named = _pick(record, ("epoch", "timestamp", *_EPOCH_FIELDS))
    return named | {key: value for key, value in record.items() if key not in named.keys() | _JOURNAL_FIELDS}


def _pick(record: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    return {name: record.get(name) for name in fields}


def _line(record: Mapping[str, Any]) -> bytes:
    # orjson writes null for NaN: a missing figure must not make the file invalid.
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _write_json(path: Path, content: Any) -> None:
    write_atomic(path, orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
