"""Run directories of runs that went wrong, or are odd, for the tests of the pages.

    python -m tests.support.sick_runs DIRECTORY

    stopped        its process was killed           failed     its second step fails on the backend
    not-learning   rewards by chance, step by step  large      groups of 64, one rollout of 100 turns
    dpo            pairs: the best and the worst    half-read  100,000 rollouts in 782 steps

All but `half-read` are written by `insitu finetune` over a stand-in backend; `half-read` repeats the lines of
one of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.finetune_bench import FinetuneBench, agent, ask, open_bench, position, rewards
from tests.support.standin_engine import Behaviour

NUM_STEPS, ROLLOUTS_A_STEP = 782, 128
LONG_TURNS = 100
OUT_OF_MEMORY = "the trainer ran out of memory"
_drawn = random.Random(4)


async def one_turn(value: Any, context: Any) -> str:
    """Ask once."""
    said = await ask(context.llm(), [{"role": "user", "content": f"{context.rollout_id} {value}"}])
    return said["message"]["content"]


async def many_turns(value: Any, context: Any) -> str:
    """Ask once; in the first rollout of each group, a hundred times in one conversation."""
    _, generation = position(context.rollout_id)
    messages = [{"role": "user", "content": f"{context.rollout_id} {value}"}]
    for turn in range(LONG_TURNS if generation == 0 else 1):
        said = (await ask(context.llm(), messages))["message"]
        messages += [
            {"role": "assistant", "content": said["content"]},
            {"role": "user", "content": f"and {turn}?"},
        ]
    return said["content"]


def by_chance(item: Any) -> float:
    """A reward that nothing can raise, the same in every run, so that the verdict is, too."""
    _, epoch, index, generation, _ = item.rollout_id.rsplit(".", 4)
    return 0.5 + 0.1 * random.Random(f"{epoch} {index} {generation}").random()


def by_place(item: Any) -> float:
    """Different within every group."""
    _, generation = position(item.rollout_id)
    return generation / 100


_SICK: dict[str, dict[str, Any]] = {
    "not-learning": {"agent": one_turn, "reward": by_chance, "epochs": 30, "examples": 6, "siblings": 8},
    "large": {"agent": many_turns, "reward": by_place, "epochs": 2, "examples": 1, "siblings": 64},
    "dpo": {
        "agent": one_turn,
        "reward": by_place,
        "epochs": 3,
        "examples": 2,
        "siblings": 4,
        "method": "dpo",
    },
    "failed": {"agent": one_turn, "reward": by_place, "epochs": 2, "examples": 2, "siblings": 4},
    "stopped": {"agent": one_turn, "reward": by_place, "epochs": 3, "examples": 2, "siblings": 4},
}


async def make_sick(name: str, into: Path) -> None:
    """Run `insitu finetune` to its end and keep the run directory."""
    wanted = _SICK[name]
    patch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory() as folder:
        try:
            benches: list[FinetuneBench] = []

            def answer(_: object) -> str:
                if name == "failed" and benches and benches[0].backend.num_steps:
                    benches[0].backend.fail_next_job = OUT_OF_MEMORY
                return f"{_drawn.randrange(10**6)}"

            behaviour = Behaviour(answers=answer)
            async with open_bench(Path(folder), patch, behaviour, num_examples=wanted["examples"]) as bench:
                benches.append(bench)
                bench.project.write_rows("validation.json", 10, start=50)
                bench.project.configure(
                    llms={"policy": {"max_tokens": 24}},
                    workflow=agent(wanted["agent"]),
                    eval=rewards(wanted["reward"]),
                    trajectory_builders={"groups": {"num_generations": wanted["siblings"]}},
                    trainer_adapters={"backend": {"training": {"method": wanted.get("method", "grpo")}}},
                    finetuning={"num_epochs": wanted["epochs"]},
                )
                await bench.run(**({} if name == "failed" else {"validation_dataset": "validation.json"}))
                shutil.copytree(bench.project.output, into)
        finally:
            patch.undo()
    if name == "stopped":
        journal = into / "journal.jsonl"
        kept = [line for line in journal.read_text().splitlines() if json.loads(line).get("event") != "ended"]
        journal.write_text("\n".join(kept) + "\n")


def make_half_read(of: Path, into: Path) -> None:
    """Write a run so large that its index takes a while; its reward rises by 0.001 with each step."""
    (into / "trajectories").mkdir(parents=True)
    (into / "left_out").mkdir()
    config = json.loads((of / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"run_id": "run_large"}))
    shutil.copy(of / "journal.jsonl", into)
    step = json.loads((of / "steps.jsonl").read_text().splitlines()[0])
    rollout = json.loads((of / "trajectories" / "epoch-0000.jsonl").read_text().splitlines()[0])
    needed = ("id", "model", "policy_step", "policy_version", "finish_reason", "num_output_tokens")
    rollout["calls"] = [{name: rollout["calls"][0][name] for name in needed}]
    rollout.pop("tokens", None)
    steps: list[str] = []
    for number in range(NUM_STEPS):
        reward = number / 1000
        lines = [
            rollout
            | {
                "rollout_id": f"r{number}.{place}",
                "index": place // 8,
                "generation": place % 8,
                "reward": reward,
                "started_at": 1_700_000_000.0 + number * 60 + place,
            }
            for place in range(ROLLOUTS_A_STEP)
        ]
        name = f"epoch-{number:04d}"
        (into / "trajectories" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        (into / "left_out" / f"{name}.json").write_text("{}")
        account = step["account"] | {"total": ROLLOUTS_A_STEP, "trained": ROLLOUTS_A_STEP, "dropped": {}}
        line = step | {
            "epoch": number,
            "step": number + 1,
            "avg_reward": reward,
            "min_reward": reward,
            "max_reward": reward,
            "reward_std": 0.0,
            "num_rewarded": ROLLOUTS_A_STEP,
            "num_trajectories": ROLLOUTS_A_STEP,
            "num_groups": ROLLOUTS_A_STEP // 8,
            "account": account,
            "training": {"time/train_seconds": 9.0},
        }
        steps.append(json.dumps(line) + "\n")
    (into / "steps.jsonl").write_text("".join(steps))


def main() -> None:
    root = Path(sys.argv[1])
    for name in _SICK:
        asyncio.run(make_sick(name, root / name))
    make_half_read(root / "stopped", root / "half-read")


if __name__ == "__main__":
    # By its name, so that the configuration names agent and reward where another process finds them.
    from tests.support import sick_runs

    made: Callable[[], None] = sick_runs.main
    made()
