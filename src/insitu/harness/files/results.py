"""The results of an evaluation in `eval.general.output_dir`, in the original harness's format.

<output_dir>/epoch-0000/workflow_output.json       the workflow's output for each rollout
<output_dir>/epoch-0000/<evaluator>_output.json    the scores
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

import orjson

from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.rollouts.rollout import Rollout

Result = Mapping[str, object]


def write_results(directory: Path, name: str, reward: str, store: RolloutStore) -> None:
    """Write both files of one epoch or validation, holding one rollout in memory at a time."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    rewards = [rollout.reward for rollout in store.rollouts() if rollout.reward is not None]
    average = sum(rewards) / len(rewards) if rewards else None
    _write(folder / "workflow_output.json", b"[", store, _output, b"\n]\n")
    head = b'{"average_score": ' + orjson.dumps(average) + b', "eval_output_items": ['
    _write(folder / f"{reward}_output.json", head, store, _score, b"\n]}\n")


def _write(
    path: Path, head: bytes, store: RolloutStore, view: Callable[[Rollout], Result], tail: bytes
) -> None:
    staged = path.with_name(f".{path.name}.tmp")
    with staged.open("wb") as out:
        out.write(head)
        _write_items(out, map(view, store.rollouts()))
        out.write(tail)
    staged.replace(path)


def _write_items(out: IO[bytes], items: Iterable[Result]) -> None:
    for number, item in enumerate(items):
        out.write((b",\n  " if number else b"\n  ") + orjson.dumps(item))


def _output(rollout: Rollout) -> Result:
    details = rollout.details()
    return {
        "id": rollout.example_id,
        "question": details.input,
        "answer": details.expected,
        "generated_answer": details.output,
        "rollout_id": rollout.rollout_id,
        "ending": rollout.ending,
    }


def _score(rollout: Rollout) -> Result:
    details = rollout.details()
    result = {
        "id": rollout.example_id,
        "score": rollout.reward,
        "reasoning": details.reasoning,
        "error": rollout.reason if rollout.failed else None,
        "rollout_id": rollout.rollout_id,
    }
    return result | ({"step_rewards": details.call_rewards} if details.call_rewards else {})
