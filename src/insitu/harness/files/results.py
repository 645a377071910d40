"""The results of an evaluation in `eval.general.output_dir`, in the original harness's format.

<output_dir>/epoch-0000/workflow_output.json       the workflow's output for each rollout
<output_dir>/epoch-0000/<evaluator>_output.json    the scores
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import orjson

from insitu.harness.files.trajectory_store import TrajectoryStore

Json = dict[str, Any]


def write_results(directory: Path, name: str, reward: str, store: TrajectoryStore) -> None:
    """Write both files of one epoch or validation, holding one rollout in memory at a time."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    rewards = [entry.reward for entry in store.entries() if entry.reward is not None]
    average = sum(rewards) / len(rewards) if rewards else None
    _write(folder / "workflow_output.json", b"[", store, _output, b"\n]\n")
    head = b'{"average_score": ' + orjson.dumps(average) + b', "eval_output_items": ['
    _write(folder / f"{reward}_output.json", head, store, _score, b"\n]}\n")


def _write(
    path: Path, head: bytes, store: TrajectoryStore, view: Callable[[Json], Json], tail: bytes
) -> None:
    staged = path.with_name(f".{path.name}.tmp")
    with staged.open("wb") as out:
        out.write(head)
        _write_items(out, (view(store.read(entry.rollout_id)) for entry in store.entries()))
        out.write(tail)
    staged.replace(path)


def _write_items(out: IO[bytes], items: Iterable[Json]) -> None:
    for number, item in enumerate(items):
        out.write((b",\n  " if number else b"\n  ") + orjson.dumps(item))


def _output(record: Json) -> Json:
    return {
        "id": record["example_id"],
        "question": record["input"],
        "answer": record["expected"],
        "generated_answer": record["output"],
        "rollout_id": record["rollout_id"],
        "ending": record["ending"],
    }


def _score(record: Json) -> Json:
    steps = {"step_rewards": record["step_rewards"]} if record.get("step_rewards") else {}
    return {
        "id": record["example_id"],
        "score": record["reward"],
        "reasoning": record.get("reasoning"),
        "error": record["reason"] if record["reward"] is None else None,
        "rollout_id": record["rollout_id"],
        **steps,
    }
