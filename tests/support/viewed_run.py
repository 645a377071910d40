"""A run directory to look at: two-turn additions answered by a stand-in that gets better with each update.

python -m tests.support.viewed_run --directory D     keeps the run, and a tokenizer of its tokens
python -m tests.support.viewed_run --stay D          prints its configuration and keeps the backend
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.finetune_bench import FinetuneBench, agent, ask, open_bench, position, rewards
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import PROMPT_IDS, Behaviour

LONGEST = 24
"""The token limit of a call; an answer beyond it is cut off."""
_SPELLED, _LAST_CHARACTER = 100_000, 0x250


async def adder(value: Any, context: Any) -> str:
    """Ask for the sum, look it up with a tool, ask again."""
    index, generation = position(context.rollout_id)
    question = str(value["question"] if isinstance(value, dict) else value)
    messages = [
        {"role": "system", "content": "Add. Reply with the number only."},
        {"role": "user", "content": f"What is {index} + 7? ({question})"},
    ]
    if index == 4 and generation == 1:
        raise ValueError("the calculator is not plugged in: <b>&amp;</b>")
    first = (await ask(context.llm(), messages))["message"]
    if index % 2:
        return first["content"]
    messages += [{"role": "assistant", "content": first["content"]}, _tool(index)]
    return (await ask(context.llm(), messages))["message"]["content"]


def _tool(index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "t1", "name": "calculator", "content": str(index + 7)}


def exactness(item: Any) -> float:
    """1 for the sum, a part of it for any other number of as many digits."""
    index, _ = position(item.rollout_id)
    said, right = str(item.output).strip(), str(index + 7)
    if said == right:
        return 1.0
    return 0.3 if said.isdigit() and len(said) == len(right) else 0.1 if said.isdigit() else 0.0


def answers(bench: list[FinetuneBench], seed: int) -> Any:
    """A policy that is right more often after every update, and cut off less often."""
    drawn = random.Random(seed)

    def answer(messages: list[dict[str, str]]) -> str:
        steps = bench[0].backend.num_steps if bench else 0
        question = next(each["content"] for each in messages if each["role"] == "user")
        right = int(question.split()[2]) + 7
        if drawn.random() < 0.05 + 0.08 * steps:
            return str(right)
        if drawn.random() < max(0.02, 0.2 - 0.03 * steps):
            return f"{right} is what I would say, but let me count once more"
        return drawn.choice(
            [str(right + 1), str(right)[:1], f"{right} <script>alert(1)</script>"[:20], "ten?"]
        )

    return answer


def add_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in report figures of a trainer; they are made up."""
    commit = StandinBackend._commit

    def with_figures(self: Any, job: Any, run: Any, metrics: dict[str, float]) -> None:
        step = run.step + 1
        figures = {
            "entropy": 2.0 / step,
            "kl/reference": 0.001 * step,
            "mismatch/kl": 0.002,
            "grad_norm": 0.5 / step,
            "learning_rate": 5e-5,
            "time/publish_seconds": 0.02,
            "time/probe_seconds": 0.01,
        }
        commit(self, job, run, metrics | figures)

    monkeypatch.setattr(StandinBackend, "_commit", with_figures)


@asynccontextmanager
async def running(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, num_epochs: int = 3, num_examples: int = 6, seed: int = 1
) -> AsyncIterator[FinetuneBench]:
    """Run `insitu finetune` to its end; the backend stays until the block does."""
    add_figures(monkeypatch)
    benches: list[FinetuneBench] = []
    behaviour = Behaviour(answers=answers(benches, seed))
    async with open_bench(path, monkeypatch, behaviour, num_examples=num_examples) as bench:
        benches.append(bench)
        bench.project.write_rows("validation.json", 6, start=10)
        bench.project.configure(
            llms={"policy": {"max_tokens": LONGEST}},
            workflow=agent(adder),
            eval=rewards(exactness),
            trajectory_builders={"groups": {"num_generations": 4}},
            finetuning={"num_epochs": num_epochs, "groups_per_step": 3},
        )
        summary = await bench.run(validation_dataset="validation.json")
        assert summary.outcome == "succeeded", summary.reason
        yield bench


async def make_run(path: Path, monkeypatch: pytest.MonkeyPatch, *, num_epochs: int = 3) -> Path:
    """Run `insitu finetune` to its end; return the run directory."""
    async with running(path, monkeypatch, num_epochs=num_epochs) as bench:
        return bench.project.output


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json that names the stand-in's tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    roles = {3: "system", 4: "user", 5: "assistant", 6: "tool", 7: "developer"}
    special = {1: "<s>", 2: "<|im_end|>", **{token: f"<|{role}|>" for token, role in roles.items()}}
    vocabulary = {f"unused{token}": token for token in PROMPT_IDS if token not in special}
    vocabulary |= {chr(code).replace(" ", "▁"): _SPELLED + code for code in range(32, _LAST_CHARACTER)}
    added = [{"id": token, "content": name, "special": True} for token, name in special.items()]
    document = {
        "model": {"type": "BPE", "vocab": vocabulary, "unk_token": None},
        "decoder": {"type": "Metaspace"},
        "added_tokens": added,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


async def stay(path: Path, monkeypatch: pytest.MonkeyPatch, num_epochs: int) -> None:
    """Make the run, and keep its backend for whoever closes stdin."""
    async with running(path, monkeypatch, num_epochs=num_epochs) as bench:
        print(bench.project.path / "config.yml", flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--directory", type=Path)
    where.add_argument("--stay", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--epochs", type=int, default=6)
    given = parser.parse_args()
    if given.tokenizer is not None:
        write_tokenizer(given.tokenizer)
    patch = pytest.MonkeyPatch()
    if given.stay is not None:
        asyncio.run(stay(given.stay, patch, given.epochs))
        return
    with tempfile.TemporaryDirectory() as folder:
        made = asyncio.run(make_run(Path(folder), patch, num_epochs=given.epochs))
        patch.undo()
        shutil.copytree(made, given.directory)


if __name__ == "__main__":
    # By its name, so that the configuration names agent and reward where another process finds them.
    from tests.support import viewed_run

    viewed_run.main()
