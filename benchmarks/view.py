"""Measure how fast `insitu view` opens a large run: the index, and every page.

    python benchmarks/view.py --json [--rollouts 100000] [--tokens 2000]

The run is made up: steps of 128 rollouts in groups of 8, two calls each. Every rollout of a step names the
same block of tokens, so that the disk holds one of them. Pages are asked for through the application, as a
browser does; each figure is the median of several requests, in milliseconds, with the processor time beside
it. Exits with 1 if a page takes over 2 s.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import struct
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import orjson
from starlette.testclient import TestClient

from insitu.view.catalogue import Catalogue
from insitu.view.http.app import build_app
from insitu.view.reading.index import RunIndex
from insitu.view.reading.run_files import RunFiles

PORT = 7777
GROUPS, SIBLINGS = 16, 8
MAX_MS = 2000.0
REPEATS = 5


def block_of(num_tokens: int) -> bytes:
    """The tokens of two calls: a prompt of a quarter of them, then the answers."""
    prompt, output = num_tokens // 4, num_tokens // 4
    packed = b""
    for _ in range(2):
        packed += struct.pack("<BII", 1, prompt, output)
        packed += struct.pack(f"<{prompt + output}I", *range(prompt + output))
        packed += struct.pack(f"<{output}f", *([-0.5] * output))
    return packed


def call(rollout_id: str, number: int, num_tokens: int) -> dict[str, Any]:
    shared = {"parent_id": f"{rollout_id}-0", "shared_tokens": num_tokens // 2, "shared_messages": 2}
    alone = {"parent_id": None, "shared_tokens": 0, "shared_messages": 0}
    message = {"role": "user", "content": "What is the sum of all the numbers in this row? " * 4}
    return {
        "id": f"{rollout_id}-{number}",
        "rollout_id": rollout_id,
        "model": "large",
        "run": "large",
        "policy_step": 0,
        "policy_version": "base",
        "finish_reason": "stop",
        "messages": [message, message] if number == 0 else [message],
        "tools": None,
        "answer": {"role": "assistant", "content": "It is the number that you asked for. " * 4},
        "sampling": {"temperature": 1.0},
        "timings": {"total": 0.1},
        "shared_tools": False,
        "num_prompt_tokens": num_tokens // 4,
        "num_output_tokens": num_tokens // 4,
        **(shared if number else alone),
    }


def write_step(run: Path, number: int, num_rollouts: int, num_tokens: int) -> dict[str, Any]:
    """Write the files of one step; return its line of steps.jsonl."""
    name = f"epoch-0000-step-{number:04d}"
    block = block_of(num_tokens)
    (run / "trajectories" / f"{name}.tokens").write_bytes(block)
    tokens = {"offset": 0, "length": len(block), "crc32": zlib.crc32(block)}
    lines: list[bytes] = []
    for place in range(num_rollouts):
        index, generation = divmod(place, SIBLINGS)
        rollout_id = f"run_large.e0.{number}.{index}.{generation}"
        calls = [call(rollout_id, each, num_tokens) for each in range(2)]
        line = {
            "rollout_id": rollout_id,
            "example_id": f"row-{index}",
            "index": index,
            "generation": generation,
            "ending": "length" if place % 17 == 0 else "completed",
            "reward": (place * 7919 + number) % 11 / 10,
            "seconds": 1.0,
            "started_at": 1e9 + number * 60 + place / 1000,
            "call_ids": [each["id"] for each in calls],
            "metadata": {"num_calls": 2, "num_output_tokens": num_tokens // 2, "policy_steps": [number]},
            "input": f"question {index} of step {number}",
            "expected": "42",
            "output": f"answer {place}",
            "calls": calls,
            "tokens": tokens,
        }
        lines.append(orjson.dumps(line))
    (run / "trajectories" / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (run / "left_out" / f"{name}.json").write_bytes(b"{}")
    account = {
        "total": num_rollouts,
        "trained": num_rollouts,
        "truncated": 0,
        "dropped": {},
        "endings": {},
        "line": "",
    }
    verdict = {"code": "learning", "causes": [], "sentence": "learning"}
    return {
        "epoch": 0,
        "step_of_epoch": number,
        "step": number + 1,
        "timestamp": "2026-01-01T00:00:00+00:00",
        "avg_reward": 0.5,
        "num_groups": GROUPS,
        "account": account,
        "verdict": verdict,
    }


def write_run(run: Path, num_rollouts: int, num_tokens: int) -> None:
    for folder in ("trajectories", "left_out"):
        (run / folder).mkdir(parents=True)
    training = {"method": "grpo"}
    config = {
        "finetuning": {"trainer_adapter": "backend"},
        "trainer_adapters": {
            "backend": {"training": training, "backend": {"name": "large", "base_model": ""}}
        },
    }
    known = {"run_id": "run_large", "fingerprint": "", "started_at": 1e9, "config": config}
    (run / "config.json").write_bytes(orjson.dumps(known))
    each = GROUPS * SIBLINGS
    with (run / "steps.jsonl").open("wb") as steps:
        for number, start in enumerate(range(0, num_rollouts, each)):
            line = write_step(run, number, min(each, num_rollouts - start), num_tokens)
            steps.write(orjson.dumps(line) + b"\n")
    (run / "journal.jsonl").write_bytes(orjson.dumps({"event": "ended", "outcome": "succeeded"}) + b"\n")


def addresses(client: TestClient, num_steps: int) -> dict[str, str]:
    """The pages to open, by name."""
    run = "/view/v1/runs/run_large"
    cursor = client.get(f"{run}/rollouts?limit=200").json()["next"]
    middle = f"epoch-0000-step-{num_steps // 2:04d}"
    after = f"epoch-0000-step-{num_steps - 1:04d}"
    return {
        "runs": "/view/v1/runs",
        "run": run,
        "rollouts, first page": f"{run}/rollouts?limit=200",
        "rollouts, second page": f"{run}/rollouts?limit=200&cursor={cursor}",
        "rollouts, newest": f"{run}/rollouts?limit=200&sort=newest",
        "rollouts, best": f"{run}/rollouts?limit=200&sort=best",
        "rollouts, longest": f"{run}/rollouts?limit=200&sort=longest",
        "rollouts by ending and reward": f"{run}/rollouts?limit=200&ending=length&min_reward=0.5",
        "rollouts by reason": f"{run}/rollouts?limit=200&reason=truncated",
        "rollouts of a step": f"{run}/rollouts?limit=200&store={middle}",
        "rollouts by text, found": f"{run}/rollouts?limit=200&text=answer%2077",
        "rollouts by text, not found": f"{run}/rollouts?limit=200&text=nowhere",
        "one rollout": f"{run}/rollouts/run_large.e0.{num_steps // 2}.3.1",
        "groups": f"{run}/groups?limit=200",
        "groups by spread": f"{run}/groups?limit=200&sort=spread",
        "one group": f"{run}/groups/{middle}/3",
        "compare": f"{run}/compare?before=epoch-0000-step-0000&after={after}",
    }


def measured(client: TestClient, address: str) -> dict[str, float]:
    """Median milliseconds, those of the processor, and the size of an answer."""
    times: list[float] = []
    used: list[float] = []
    size = 0
    for _ in range(REPEATS):
        began, before = time.perf_counter(), time.process_time()
        answer = client.get(address)
        times.append(1000 * (time.perf_counter() - began))
        used.append(1000 * (time.process_time() - before))
        assert answer.status_code == 200, answer.text
        size = len(answer.content)
    figures = {"ms": statistics.median(times), "cpu_ms": statistics.median(used), "kb": size / 1e3}
    return {name: round(value, 1) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2_000, help="tokens of a rollout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "large"
        write_run(run, options.rollouts, options.tokens)
        stored = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        index = RunIndex(RunFiles.open(run))
        began, used = time.perf_counter(), time.process_time()
        while not index.refresh():
            pass
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        began = time.perf_counter()
        index.refresh()
        again = time.perf_counter() - began
        size = index.path.stat().st_size
        index.close()
        num_steps = -(-options.rollouts // (GROUPS * SIBLINGS))
        app = build_app(Catalogue(run), PORT)
        with TestClient(app, base_url=f"http://127.0.0.1:{PORT}") as client:
            pages = {
                name: measured(client, address) for name, address in addresses(client, num_steps).items()
            }
    result = {
        "rollouts": options.rollouts,
        "tokens_per_rollout": options.tokens,
        "stored_mb": stored / 1e6,
        "index_mb": size / 1e6,
        "index_seconds": seconds,
        "index_cpu_seconds": cpu,
        "nothing_new_ms": 1000 * again,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "pages": pages,
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    if max(page["ms"] for page in pages.values()) > MAX_MS:
        sys.exit("a page takes more than 2 s")


if __name__ == "__main__":
    main()
