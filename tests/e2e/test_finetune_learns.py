"""`insitu serve` and `insitu finetune` as a user runs them: a real model learns, and the files agree."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.backend import Backend

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "addition"


def finetune_command(backend: Backend) -> list[str]:
    overrides = {
        "llms.adder.base_url": f"{backend.gateway_url}/v1",
        "trainer_adapters.backend.backend.port": str(backend.port),
        "finetuning.num_epochs": "12",  # of 25: enough for what is asserted
    }
    flags = [part for path, value in overrides.items() for part in ("-o", path, value)]
    files = ["--config_file=config.yml", "--validation_dataset=data/validation.json"]
    return [sys.executable, "-m", "insitu.cli", "finetune", *files, *flags]


async def run(command: list[str], directory: Path) -> tuple[int, str]:
    """The exit code and the output, which is also shown as it comes."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async for line in process.stdout:
            lines.append(line.decode())
            print(lines[-1], end="", flush=True)
        return await process.wait(), "".join(lines)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.timeout(1500)
async def test_finetune_learns(tmp_path: Path, backend: Backend) -> None:
    example = tmp_path / "addition"
    shutil.copytree(EXAMPLE, example, ignore=shutil.ignore_patterns("output", "__pycache__"))
    log = backend.state_dir / "logs" / "replica-0.log"
    logged_before = log.stat().st_size
    started = time.monotonic()
    code, text = await run(finetune_command(backend), example)
    seconds = time.monotonic() - started
    async with backend.client() as client:
        steps = await client.steps("adder")
        checkpoints = await client.checkpoints("adder")
    output = example / "output"
    measured = json.loads((output / "validation_history.json").read_text())
    history = [entry for entry in measured if not entry.get("remeasured")]
    # The last step may have dipped; the run announces its best one, with new samples of it.
    (announced,) = [entry for entry in measured if entry.get("remeasured")]
    before, after = history[0]["avg_reward"], announced["avg_reward"]
    print(f"validation before={before:.3f} best={after:.3f} seconds={seconds:.0f}", flush=True)
    assert code == 0
    assert after >= 0.4
    assert after >= 5 * before
    assert prefix_hit_rate(log.read_bytes()[logged_before:].decode()) >= 60, (
        "siblings do not share their prompts"
    )
    check_files(output, history)
    epochs = read_lines(output / "training_metrics.jsonl")
    assert [step.step for step in steps] == [line["step"] for line in epochs if line["step"]]
    best = max((entry for entry in history if entry["step"]), key=lambda entry: entry["avg_reward"])
    assert best["step"] in {checkpoint.step for checkpoint in checkpoints if checkpoint.pinned}
    assert f"step {best['step']}" in text


def prefix_hit_rate(log: str) -> float:
    """The share of prompt tokens that the engine found in its cache while an epoch sampled, in percent.

    The engine reports the share of its latest calls: at first those of the test before; a lower one after a
    validation, which has no siblings.
    """
    rates = [float(rate) for rate in re.findall(r"Prefix cache hit rate: ([\d.]+)%", log)]
    return max(rates[len(rates) // 2 :])


def check_files(output: Path, history: list[dict[str, Any]]) -> None:
    """The files tell one story: the metrics are those of the rollouts on disk."""
    epochs = read_lines(output / "training_metrics.jsonl")
    rewards = json.loads((output / "reward_history.json").read_text())
    assert [line["epoch"] for line in epochs] == list(range(len(epochs))) == [r["epoch"] for r in rewards]
    for line, reward in zip(epochs, rewards, strict=True):
        rollouts = read_lines(output / "trajectories" / f"epoch-{line['epoch']:04d}.jsonl")
        scored = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
        assert len(rollouts) == line["num_trajectories"] == line["account"]["total"]
        assert line["avg_reward"] == reward["avg_reward"] == pytest.approx(sum(scored) / len(scored))
        dropped = line["account"]["dropped"]
        assert line["account"]["trained"] + sum(dropped.values()) == line["account"]["total"]
    assert history[0]["epoch"] == 0
    assert history[-1]["epoch"] == len(epochs)
    for entry in history:
        rollouts = read_lines(output / "trajectories" / f"validation-{entry['epoch']:04d}.jsonl")
        assert entry["avg_reward"] == pytest.approx(sum(r["reward"] for r in rollouts) / len(rollouts))
    assert (output / "reward_plot.png").read_bytes().startswith(b"\x89PNG")
    state = json.loads((output / "curriculum_state.json").read_text())
    assert state["current_percentile"] == epochs[-1]["curriculum_percentile"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    # Bytes: sampled text may hold characters that `str.splitlines` takes for an end of line.
    return [json.loads(line) for line in path.read_bytes().splitlines()]
