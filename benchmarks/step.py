"""Compare a training step through insitu with the same step without any framework, alternating in one run.

    python benchmarks/step.py --json [--steps 5] [--bare ../shared/reference/bare_grpo.py]

Both sides use the same engine settings, model, task (16 × 8 single-digit additions) and LoRA. The bare loop
restarts for every measurement: its first step warms it up, and its second step is measured. Chance decides
which groups have any spread in reward, and so how many tokens are trained on. The bare loop's training time
is therefore also given scaled to insitu's number of tokens (`adjusted`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.engine import MAX_LENGTH, MAX_NUM_SEQS, bare_engine, this_machine
from insitu.backend.plan.compute import this_cpu
from insitu.client import InsituClient
from insitu.testing.models import smollm2
from insitu.types import StepSettings
from tests.support.addition import Rollouts, question, sample_groups, train
from tests.support.backend import Backend

NUM_GROUPS, GROUP_SIZE = 16, 8
Row = dict[str, float]


def bare_step(script: Path, url: str, scratch: Path, seed: int) -> Row:
    """Measure the second step of the bare loop."""
    command = [sys.executable, str(script), "--model", str(smollm2()), "--publish-dir", str(scratch / "bare")]
    command += ["--base-url", url, "--steps", "2", "--seed", str(seed), "--dtype", this_machine().dtype]
    for attempt in range(3):  # its HTTP client now and then meets a connection that the engine is closing
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        if done.returncode == 0:
            break
        print(f"bare loop failed, attempt {attempt + 1}: {done.stderr.strip()[-200:]}", file=sys.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith("step=1 "))
    row = {name: float(value) for name, value in re.findall(r"(\w+)=([-\d.]+)", line)}
    return {
        "sample": row["sample_s"],
        "train": row["train_s"],
        "publish": row["publish_s"],
        "tokens": row["tokens"],
        "seconds": row["sample_s"] + row["train_s"] + row["publish_s"],
    }


async def insitu_step(client: InsituClient, rollouts: Rollouts, generator: random.Random) -> Row:
    """Measure one step as a user of the HTTP API sees it."""
    began = time.perf_counter()
    groups = await sample_groups(rollouts, [question(generator) for _ in range(NUM_GROUPS)], GROUP_SIZE)
    sampled = time.perf_counter()
    job = await train(client, groups, StepSettings(learning_rate=3e-4))
    ended = time.perf_counter()
    return {
        "sample": sampled - began,
        "train": job.metrics["time/train_seconds"],
        "publish": job.metrics["time/publish_seconds"],
        "probe": job.metrics["time/probe_seconds"],
        "checkpoint": job.metrics["time/checkpoint_seconds"],
        "tokens": job.metrics["num_input_tokens"],
        "seconds": ended - began,
    }


async def measure(steps: int, script: Path, scratch: Path) -> dict[str, Any]:
    arguments = ["--model", str(smollm2()), "--model-name", "smollm2", "--max-seq-length", str(MAX_LENGTH)]
    backend = Backend(scratch / "state", [*arguments, "--max-num-seqs", str(MAX_NUM_SEQS)])
    bare_rows: list[Row] = []
    insitu_rows: list[Row] = []
    with bare_engine(scratch) as url:
        backend.start()
        try:
            await backend.ready()
            async with backend.client() as client, aiohttp.ClientSession() as http:
                await client.register_run("bench", "smollm2")
                await client.wait_run_ready("bench", 60)
                rollouts, generator = Rollouts(http, backend.gateway_url, "bench"), random.Random(0)
                await insitu_step(client, rollouts, generator)  # warms up, as the bare loop's first step does
                for index in range(steps):
                    bare_rows.append(await asyncio.to_thread(bare_step, script, url, scratch, index))
                    insitu_rows.append(await insitu_step(client, rollouts, generator))
                    print(f"bare {show(bare_rows[-1])}\ninsitu {show(insitu_rows[-1])}", file=sys.stderr)
        finally:
            backend.end()
    return summary(bare_rows, insitu_rows)


def show(row: Row) -> str:
    return " ".join(f"{name}={value:.2f}" for name, value in row.items())


def summary(bare: list[Row], insitu: list[Row]) -> dict[str, Any]:
    adjusted = [
        b["seconds"] + b["train"] * (i["tokens"] / b["tokens"] - 1) for b, i in zip(bare, insitu, strict=True)
    ]
    mine = [row["seconds"] for row in insitu]
    plain = [row["seconds"] for row in bare]
    return {
        "bare_seconds": plain,
        "bare_adjusted_seconds": adjusted,
        "insitu_seconds": mine,
        "ratio": statistics.mean(mine) / statistics.mean(plain),
        "ratio_adjusted": statistics.mean(mine) / statistics.mean(adjusted),
        "bare": mean_row(bare),
        "insitu": mean_row(insitu),
        "cpu": this_cpu(),
    }


def mean_row(rows: list[Row]) -> Row:
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bare", type=Path, default=Path("../shared/reference/bare_grpo.py"))
    options = parser.parse_args()
    if not options.bare.exists():
        raise SystemExit(f"no bare loop at {options.bare}; pass --bare PATH")
    with tempfile.TemporaryDirectory(prefix="insitu-vllm-") as scratch:
        result = asyncio.run(measure(options.steps, options.bare, Path(scratch)))
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"step time {result['ratio']:.2f} × the bare loop's ({result['ratio_adjusted']:.2f} × adjusted)"
        )


if __name__ == "__main__":
    main()
