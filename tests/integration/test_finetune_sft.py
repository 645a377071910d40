"""Supervised finetuning through `insitu finetune`: demonstrations on a real engine and a real trainer."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from insitu.testing.models import tiny
from tests.support.backend import running_backend
from tests.support.finetuning import Project

COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}


def rows() -> list[dict[str, Any]]:
    return [
        {
            "id": thing,
            "messages": [
                {"role": "user", "content": f"What colour has {thing}?"},
                {"role": "assistant", "content": f"It is {colour}."},
            ],
        }
        for thing, colour in COLOURS.items()
    ]


@pytest.mark.sweep
@pytest.mark.timeout(600)
async def test_demonstrations_become_more_likely(tmp_path: Path) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "256"]
    async with running_backend(tmp_path / "state", *arguments, "--dtype", "float32") as backend:
        port = int(backend.api_url.rpartition(":")[2])
        project = Project(tmp_path / "project", port, backend.gateway_url)
        (project.path / "train.json").write_text(json.dumps(rows()))
        project.configure(
            trajectory_builders={"demonstrations": {"_type": "demonstrations"}},
            trainer_adapters={"backend": {"training": {"method": "sft", "learning_rate": 5e-3}}},
            finetuning={"trajectory_builder": "demonstrations", "num_epochs": 2},
        )
        done = await asyncio.to_thread(project.run, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    first, second = project.lines("steps.jsonl")
    assert first["account"]["line"].startswith("trained 4/4; calls 4 seen = 4 trained")
    assert second["step"] == 2
    assert second["training"]["loss"] < 0.95 * first["training"]["loss"]
    assert not any(name.startswith("mismatch/") and value for name, value in first["training"].items())
    assert_tokens(tmp_path / "state" / "calls.db", len(COLOURS) * 2)


def assert_tokens(path: Path, num_calls: int) -> None:
    """What was learnt is each answer, up to its end of turn, as the model's tokenizer writes it."""
    from insitu.records.store import RecordStore

    with sqlite3.connect(path) as database:
        ids = [row[0] for row in database.execute("select id from calls where source = 'demonstration'")]
    assert len(ids) == num_calls
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny())
    store = RecordStore(f"sqlite:///{path}")
    try:
        texts = [tokenizer.decode(call.output_ids) for call in store.get(ids)]
    finally:
        store.close()
    assert sorted(texts) == sorted([f"It is {colour}.<|im_end|>" for colour in COLOURS.values()] * 2)
