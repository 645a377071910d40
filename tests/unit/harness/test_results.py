"""What the workflow returned and what it was worth, in files of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from insitu.harness.files.results import write_results
from insitu.harness.files.rollout_store import RolloutStore
from tests.support.rollouts import rollout_of


def record(number: int, reward: float | None, **fields: Any) -> dict[str, Any]:
    return {
        "rollout_id": f"r{number}",
        "example_id": f"row-{number}",
        "index": number,
        "generation": 0,
        "ending": "completed" if reward is not None else "evaluator_error",
        "reward": reward,
        "reason": "" if reward is not None else "it fell over",
        "input": f"question {number}",
        "expected": "x",
        "output": {"text": "ü"},
        "call_ids": [],
        **fields,
    }


def test_files_hold_every_rollout_and_no_failed_one_counts_as_zero(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "epoch-0000.jsonl") as store:
        for each in (record(0, 1.0, reasoning={"why": 1}), record(1, None), record(2, 0.5)):
            store.append(rollout_of(each))
        write_results(tmp_path / "eval", "epoch-0000", "my_reward", store)
        write_results(tmp_path / "eval", "epoch-0000", "my_reward", store)
    folder = tmp_path / "eval" / "epoch-0000"
    assert sorted(path.name for path in folder.iterdir()) == ["my_reward_output.json", "workflow_output.json"]
    outputs = json.loads((folder / "workflow_output.json").read_text())
    assert [(o["id"], o["question"], o["answer"]) for o in outputs] == [
        (f"row-{number}", f"question {number}", "x") for number in range(3)
    ]
    assert outputs[1]["ending"] == "evaluator_error"
    assert outputs[0]["generated_answer"] == {"text": "ü"}
    scores = json.loads((folder / "my_reward_output.json").read_text())
    assert scores["average_score"] == 0.75
    assert [(s["score"], s["error"]) for s in scores["eval_output_items"]] == [
        (1.0, None),
        (None, "it fell over"),
        (0.5, None),
    ]
    assert scores["eval_output_items"][0]["reasoning"] == {"why": 1}


def test_an_empty_evaluation_is_valid_json(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "v.jsonl") as store:
        write_results(tmp_path, "v", "reward", store)
    assert json.loads((tmp_path / "v" / "workflow_output.json").read_text()) == []
    empty = {"average_score": None, "eval_output_items": []}
    assert json.loads((tmp_path / "v" / "reward_output.json").read_text()) == empty
