"""Measure how many rollouts one harness process sustains: `insitu finetune` through the real gateway.

    python benchmarks/rollouts.py --json

Four processes: a stand-in engine (10-30 s a call), the gateway with the API, the harness, and this one, which
watches. One epoch of 750 examples × 8 rollouts × 3 turns, 2,000 rollouts at once. The time runs from the
first rollout until the step over all groups is acknowledged: by then every call is recorded, every rollout
scored and on disk, and every group uploaded.

The ideal is the time that the engine's delays alone take with as many rollouts at once: the delays drawn in
this very run, replayed in order with no cost in between. It is longer than their sum divided by the number
of rollouts at once (`work_seconds`), because most rollouts have ended while the last ones still run.
`share_in_engine` ignores that tail: of the rollouts that could be under way from the first start to the last,
it is the share that was waiting for the engine, on average.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import show  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from insitu.system.open_files import allow_open_files  # noqa: E402
from tests.support.finetuning import Project  # noqa: E402
from tests.support.vllm_server import free_port  # noqa: E402

GENERATIONS = 8
START_SECONDS = 60.0
AGENT = '''
"""An agent of several turns. All rollouts share one session, which ends with the workflow."""

import random

import aiohttp

from insitu.plugins import ComponentConfig, Kind, register
from insitu.workflow.workflow import Workflow


class TurnsConfig(ComponentConfig):
    llm: str
    turns: int


class Turns(Workflow):
    def __init__(self, http, turns):
        self._http, self._turns = http, turns

    async def run(self, value, context):
        llm, messages = context.llm(), []
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        for turn in range(self._turns):
            messages.append({"role": "user", "content": f"turn {turn} of {value}: " + "what next? " * 20})
            body = {"messages": messages, **llm.call_args()}
            async with self._http.post(f"{llm.base_url}/chat/completions", json=body, headers=headers) as got:
                got.raise_for_status()
                messages.append((await got.json())["choices"][0]["message"])
        return messages[-1]["content"]


@register(Kind.WORKFLOW, "bench_turns", TurnsConfig)
async def turns(config, parts):
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:
        yield Turns(http, config.turns)


async def reward(item):
    return random.Random(item.rollout_id).random()
'''


class Peaks:
    """The peak memory and the processor time of a process, as far as it was sampled."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.rss = 0
        self.fds = 0
        self.cpu_seconds = 0.0

    def look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.rss = max(self.rss, self._process.memory_info().rss)
            self.fds = max(self.fds, self._process.num_fds())
            self.cpu_seconds = sum(self._process.cpu_times()[:2])

    def figures(self) -> dict[str, float]:
        return {
            "rss_peak_mb": round(self.rss / 2**20, 1),
            "open_files_peak": self.fds,
            "cpu_seconds": round(self.cpu_seconds, 1),
        }


@contextlib.contextmanager
def child(*command: str, cwd: Path = ROOT, output: Any = None, **environment: str) -> Iterator[Any]:
    """Run a process for the duration of the block."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | environment,
        cwd=cwd,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def get(url: str, seconds: float = 30.0) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=seconds) as got:
        return json.loads(got.read() or b"{}")


def wait_up(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            get(url, 5.0)
            return
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} does not answer: {error}") from error
            time.sleep(0.1)


def make_project(path: Path, api_port: int, gateway_url: str, given: argparse.Namespace) -> Project:
    """Write the agent as an installed package, its data and its configuration."""
    project = Project(path, api_port, gateway_url)
    project.write_rows("train.json", given.rollouts // GENERATIONS)
    (path / "bench_agent.py").write_text(AGENT)
    metadata = path / "bench_agent-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench_agent\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[insitu.components]\nbench = bench_agent\n")
    file = project.configure(
        eval={
            "general": {"max_concurrency": given.concurrent},
            "evaluators": {"reward": {"entry": "bench_agent:reward"}},
        },
        trajectory_builders={"groups": {"num_generations": GENERATIONS}},
        finetuning={"num_epochs": 1},
    )
    config = yaml.safe_load(file.read_text())
    config["workflow"] = {"_type": "bench_turns", "llm": "policy", "turns": given.turns}
    file.write_text(yaml.safe_dump(config))
    return project


def replay(delays: Sequence[float], num_rollouts: int, width: int, turns: int) -> float:
    """Compute the seconds that the rollouts take if only these delays cost time, drawn in this order."""
    left, drawn = num_rollouts, iter(delays)
    running: list[tuple[float, int]] = []
    now = 0.0
    while left or running:
        if left and len(running) < width:
            left -= 1
            heapq.heappush(running, (now + next(drawn), 1))
            continue
        now, turn = heapq.heappop(running)
        if turn < turns:
            heapq.heappush(running, (now + next(drawn), turn + 1))
    return now


def run_all(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start everything, run `insitu finetune` to its end, and read its files."""
    engine_port, api_port, gateway_port = free_port(), free_port(), free_port()
    engine_url, gateway_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{gateway_port}"
    engine = ["tests/support/standin_engine.py", "--port", str(engine_port), "--tokens", str(given.tokens)]
    engine += ["--min-seconds", str(given.delay[0]), "--max-seconds", str(given.delay[1])]
    backend = ["-m", "tests.support.standin_backend", "--state-dir", str(folder / "state")]
    backend += ["--port", str(api_port), "--gateway-port", str(gateway_port), "--engine-url", engine_url]
    project = make_project(folder / "project", api_port, gateway_url, given)
    profile = ["-m", "cProfile", "-o", given.profile] if given.profile else []
    command = [*profile, *project.command()[1:]]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w+"))
        engine_process = stack.enter_context(child(*engine))
        wait_up(f"{engine_url}/health")
        backend_process = stack.enter_context(child(*backend, output=log))
        wait_up(f"{gateway_url}/health")
        peaks = {"engine": Peaks(engine_process.pid), "gateway": Peaks(backend_process.pid)}
        began = time.monotonic()
        harness = stack.enter_context(
            child(*command, cwd=project.path, output=log, PYTHONPATH=str(project.path))
        )
        peaks["harness"] = Peaks(harness.pid)
        busy: list[tuple[float, int]] = []
        while harness.poll() is None:
            busy.append((time.time(), get(f"{engine_url}/standin/load")["num_generating"]))
            for peak in peaks.values():
                peak.look()
            time.sleep(0.25)
        command_seconds = time.monotonic() - began
        drawn = get(f"{engine_url}/standin/delays")
        if harness.returncode != 0:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
    return {
        "exit_code": harness.returncode,
        **rollout_figures(project, given, drawn["delays"], busy),
        "command_seconds": round(command_seconds, 1),
        **{name: peak.figures() for name, peak in peaks.items()},
    }


def rollout_figures(
    project: Project, given: argparse.Namespace, delays: Sequence[float], busy: Sequence[tuple[float, int]]
) -> dict[str, Any]:
    """Compare the figures in the run's own files with the ideal."""
    endings: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    started, lasted = list[float](), list[float]()
    for line in (project.output / "trajectories" / "epoch-0000.jsonl").open():
        record = json.loads(line)
        endings[record["ending"]] += 1
        reasons[record["reason"]] += bool(record["reason"])
        started.append(record["started_at"])
        lasted.append(record["seconds"])
    submitted = [event["at"] for event in project.lines("journal.jsonl") if event["event"] == "submitted"]
    seconds = submitted[0] - min(started)
    generating = [count for at, count in busy if min(started) <= at <= max(started)]
    num_rollouts = given.rollouts // GENERATIONS * GENERATIONS
    ideal = replay(delays, num_rollouts, given.concurrent, given.turns)
    return {
        "rollouts": num_rollouts,
        "concurrent": given.concurrent,
        "turns": given.turns,
        "calls": len(delays),
        "errors": num_rollouts - endings["completed"],
        "reasons": {reason: count for reason, count in reasons.most_common(3) if count},
        "seconds": round(seconds, 2),
        "rollouts_per_second": round(num_rollouts / seconds, 2),
        "ideal_seconds": round(ideal, 2),
        "share_of_ideal": round(ideal / seconds, 3),
        "share_in_engine": round(sum(generating) / max(1, len(generating)) / given.concurrent, 3),
        "added_seconds_per_rollout": round((sum(lasted) - sum(delays)) / num_rollouts, 3),
        "work_seconds": round(sum(delays) / given.concurrent, 2),
        "arithmetic_seconds": round(num_rollouts * given.turns * sum(given.delay) / 2 / given.concurrent, 2),
        "share_of_work": round(sum(delays) / given.concurrent / seconds, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rollouts", type=int, default=6000)
    parser.add_argument("--concurrent", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--delay", type=float, nargs=2, default=(10.0, 30.0), help="seconds of a call")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--least-share", type=float, default=0.8, help="of the ideal, for exit code 0")
    parser.add_argument("--profile", help="write a cProfile of the harness there")
    given = parser.parse_args()
    allow_open_files()
    figures: dict[str, Any] = {
        "cpu": this_cpu(),
        "load_average_before": [round(value, 1) for value in os.getloadavg()],
    }
    with tempfile.TemporaryDirectory() as folder:
        figures |= run_all(given, Path(folder))
    met = (
        not figures["errors"] and not figures["exit_code"] and figures["share_of_ideal"] >= given.least_share
    )
    figures["met"] = met
    show(figures, as_json=given.json)
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
