"""Train for an hour while something is killed every minute; compare with the same training undisturbed.

    python benchmarks/chaos.py --json [--minutes 60] [--undisturbed-minutes 4] [--every 60]

Real are `insitu serve` with vLLM on a tiny model and `insitu finetune` with an agent. Every minute one part
gets `kill -9`, in turn: gateway, API, trainer, engine, client. The client is started again by the same
command, as a service manager would; everything else is the backend's own work. Effective time is the share of
the undisturbed steps per minute that was reached. Those are counted before and after, and the higher figure
counts, because a machine's speed drifts within an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import show  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from insitu.client import InsituClient  # noqa: E402
from insitu.errors import InsituError  # noqa: E402
from insitu.testing.models import tiny  # noqa: E402
from tests.support.backend import Backend, pid_in  # noqa: E402
from tests.support.finetuning import Project  # noqa: E402

RUN = "chaos"
VICTIMS = ("gateway", "API", "trainer", "replica", "client")
POLL_SECONDS = 0.25
WARM_STEPS = 3
WARM_SECONDS = 600.0
END_SECONDS = 60.0
SETTLE_SECONDS = 60.0
"""After the last kill: what it ended has started again."""
EPOCHS = 100_000
LEAST = {"effective_share": 0.9}
MOST = {"unexpected_exits": 0, "steps_without_training": 0, "gaps": 0, "orphans": 0}


@dataclass
class Client:
    """`insitu finetune`, started again whenever it has ended."""

    project: Project
    unexpected: list[int] = field(default_factory=list[int])
    _process: subprocess.Popen[bytes] | None = None
    _was_killed: bool = False

    def keep_up(self) -> None:
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            if not self._was_killed:
                self.unexpected.append(code)
        self._was_killed = False
        with (self.project.path / "client.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.project.command(), cwd=self.project.path, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        assert self._process is not None
        self._was_killed = True
        self._process.kill()
        self._process.wait(10)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()


@dataclass
class Watch:
    """The steps that were committed, with their times."""

    api: InsituClient
    client: Client
    commits: list[float] = field(default_factory=list[float])

    async def look(self) -> None:
        """Keep the client up and note new steps; an API that was killed is asked again later."""
        self.client.keep_up()
        try:
            async with asyncio.timeout(2):
                step = (await self.api.get_run(RUN)).step
        except (InsituError, TimeoutError):
            return
        self.commits += [time.monotonic()] * (step - len(self.commits))

    async def during(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await self.look()
            await asyncio.sleep(POLL_SECONDS)

    def between(self, start: float, end: float) -> int:
        return sum(start < each <= end for each in self.commits)


async def pid_of(backend: Backend, http: aiohttp.ClientSession, victim: str) -> int | None:
    """Return the process of a part; None while it is starting."""
    status: dict[str, Any] | None = await backend.status(http)
    if status is None:
        return None
    try:
        return pid_in(status, victim)
    except (KeyError, IndexError):
        return None


async def disturb(
    watch: Watch, backend: Backend, http: aiohttp.ClientSession, minutes: float, every: float
) -> dict[str, list[float]]:
    """Kill one part after another; return the times of the kills by part."""
    kills: dict[str, list[float]] = defaultdict(list)
    end = time.monotonic() + minutes * 60
    for victim in cycle(VICTIMS):
        if time.monotonic() + 1 > end:
            break
        pid = None if victim == "client" else await pid_of(backend, http, victim)
        if victim == "client":
            watch.client.kill()
        elif pid is not None:
            os.kill(pid, signal.SIGKILL)
        if victim == "client" or pid is not None:
            kills[victim].append(time.monotonic())
            await watch.during(min(every, end - time.monotonic()))
    return kills


def lost(watch: Watch, kills: dict[str, list[float]], step_seconds: float) -> dict[str, dict[str, float]]:
    """Return the seconds from each kill to the next step, beyond a usual step, by part."""
    found = dict[str, dict[str, float]]()
    for victim, times in kills.items():
        waits = [
            max(0.0, min((each for each in watch.commits if each > at), default=at) - at - step_seconds)
            for at in times
        ]
        found[victim] = {"kills": len(times), "median_s": round(statistics.median(waits), 1)}
        found[victim]["most_s"] = round(max(waits), 1)
    return found


def quiet(watch: Watch, kills: dict[str, list[float]], every: float) -> float:
    """Return the steps per minute in the second half of the times after kills of what is soon back."""
    starts = [at + every / 2 for victim in ("gateway", "API", "client") for at in kills.get(victim, [])]
    steps = sum(watch.between(start, start + every / 2) for start in starts)
    return steps / (len(starts) * every / 2) * 60 if starts else 0.0


async def measure(
    folder: Path, minutes: float, undisturbed_minutes: float, every: float, replicas: int
) -> dict[str, Any]:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "256"]
    arguments += ["--dtype", "float32", "--replicas", str(replicas)]
    backend = Backend(folder / "state", arguments)
    backend.start()
    project = Project(folder / "project", backend.port, backend.gateway_url, num_examples=8)
    project.configure(
        llms={"policy": {"max_tokens": 24}},
        # The model ends no answer by itself; a truncated one is trained here, too.
        trainer_adapters={"backend": {"backend": {"name": RUN}, "training": {"mask_truncated": False}}},
        finetuning={"num_epochs": EPOCHS},
    )
    client = Client(project)
    try:
        await backend.ready()
        async with backend.client() as api, aiohttp.ClientSession() as http:
            watch = Watch(api, client)
            async with asyncio.timeout(WARM_SECONDS):
                while len(watch.commits) < WARM_STEPS:
                    await watch.during(1)
            began = time.monotonic()
            await watch.during(undisturbed_minutes * 60)
            disturbed = time.monotonic()
            kills = await disturb(watch, backend, http, minutes, every)
            ended = time.monotonic()
            await watch.during(SETTLE_SECONDS)
            resumed = time.monotonic()
            await watch.during(undisturbed_minutes * 60)
            stopped = time.monotonic()
            client.end()
            steps = await api.steps(RUN)
        assert backend.process is not None
        code = backend.interrupt()
        orphans = [process.name() for process in backend.descendants()]
    finally:
        client.end()
        backend.end()
    before, reached, after = (
        watch.between(start, end) / (end - start) * 60
        for start, end in ((began, disturbed), (disturbed, ended), (resumed, stopped))
    )
    undisturbed = max(before, after)
    return {
        "steps_per_minute": {
            "before": round(before, 2),
            "disturbed": round(reached, 2),
            "after": round(after, 2),
            "quiet_halves": round(quiet(watch, kills, every), 2),
        },
        "steps_by_minute": [
            watch.between(disturbed + 60 * minute, disturbed + 60 * (minute + 1))
            for minute in range(int((ended - disturbed) // 60))
        ],
        "effective_share": round(reached / undisturbed, 3),
        "kills": sum(map(len, kills.values())),
        "lost_by_part": lost(watch, kills, 60 / undisturbed),
        "steps": len(steps),
        "steps_without_training": sum(not step.metrics.get("account/trained") for step in steps),
        "gaps": sum(after != before + 1 for before, after in pairwise([0, *(step.step for step in steps)])),
        "unexpected_exits": len(client.unexpected),
        "exits": dict(Counter(map(str, client.unexpected))),
        "backend_exit": code,
        "orphans": len(orphans),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--minutes", type=float, default=60.0, help="with a kill every so often")
    parser.add_argument("--undisturbed-minutes", type=float, default=4.0, help="before that, and after it")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--replicas", type=int, default=2, help="engines; with one, its restart stops all")
    given = parser.parse_args()
    figures: dict[str, Any] = {
        "cpu": this_cpu(),
        "load_average_before": [round(value, 1) for value in os.getloadavg()],
        "minutes": given.minutes,
        "replicas": given.replicas,
    }
    with tempfile.TemporaryDirectory(prefix="c-") as folder:  # short: Ray's sockets lie in it
        os.environ["TMPDIR"] = folder
        figures |= asyncio.run(
            measure(Path(folder), given.minutes, given.undisturbed_minutes, given.every, given.replicas)
        )
    figures["met"] = {name: figures[name] >= bound for name, bound in LEAST.items()}
    figures["met"] |= {name: figures[name] <= bound for name, bound in MOST.items()}
    show(figures, as_json=given.json)
    raise SystemExit(0 if all(figures["met"].values()) else 1)


if __name__ == "__main__":
    main()
