"""Kill a backend, or cut its power, at every change of its disk or at any time, and compare what it learned.

    python -m tests.faults.rig --part kills-adapter power-merged [--every 1] [--minutes 30] [--json]
    python -m tests.faults.rig --table          # write the table of docs/reliability.md, run nothing

After each fault the backend starts again and trains to the end. It passes if the adapter and the optimizer
have the bytes of the run without a fault, every group was trained once, steps have no gap, no run fell back,
nothing is left over, and every answered call is recorded (after a power cut: recorded, or its rollout is
known to be incomplete). The same command resumes a part that ran out of its minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.faults.rig.changes import Changes
from tests.faults.rig.life import KILLED, Parts, in_child, whole_life
from tests.faults.rig.power_cut import PowerCut
from tests.faults.rig.table import write_table
from tests.gates.test_device import VOCABULARY
from tests.support.pretended_device import StandinScores
from tests.support.small_world import build_model

PARTS = ("kills-adapter", "kills-merged", "power-adapter", "power-merged", "times-adapter", "times-merged")
NUM_TIMES = 400
"""Kills at a time of their own, between two changes of the disk more often than not."""
VARIANTS = 4
"""States for each point of a power cut: no open change happened, and three draws."""
_SAME = ("digests", "steps", "trained", "state", "left_over")
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Sweep:
    """One part: its name, a directory to work in, and what all its lives share."""

    name: str
    work: Path
    parts: Parts
    forgetful: bool = False
    """The disk forgets what was fsynced: a power cut must then be noticed."""

    @property
    def fault(self) -> str:
        return self.name.partition("-")[0]

    def reference(self) -> tuple[dict[str, Any], list[str]]:
        """Live once without a fault; return the books and the points passed, or the times to kill at."""
        passed, began = self.work / "points", time.monotonic()

        def work() -> None:
            with passed.open("w", buffering=1) as log:
                Changes(self.work / "reference" / "runs", lambda point: print(point, file=log)).watch()
                whole_life(self.work / "reference", self.parts, self._file("acks"), self._file("books"))

        if in_child(work, self._file("log")):
            raise SystemExit(f"the life without a fault failed:\n{self._file('log').read_text()[-3000:]}")
        books = json.loads(self._file("books").read_text())
        if self.fault == "times":
            lasted = time.monotonic() - began
            drawn = (random.Random(f"{self.name}-{number}").uniform(0, lasted) for number in range(NUM_TIMES))
            return books, [f"{seconds:.3f} s" for seconds in drawn]
        return books, passed.read_text().splitlines()

    def faults(self, number: int, point: str) -> Iterator[tuple[str, Path]]:
        """Live until the point, and yield each state to start from again, by name."""
        if self.fault in ("kills", "times"):
            seconds = float(point.removesuffix(" s")) if self.fault == "times" else None
            if self._killed(number, seconds) == KILLED:
                yield "killed", self.work / "state"
            return
        self._cut(number)
        yield from sorted((path.name, path) for path in self.work.glob("cut-?") if path.is_dir())

    def judge(self, state: Path, expected: dict[str, Any]) -> str | None:
        """Start again from a state; return what is wrong afterwards, or None."""
        log, books = self._file("log"), self._file("books")
        books.unlink(missing_ok=True)
        acks = state.with_name(state.name + ".acks")
        code = in_child(lambda: whole_life(state, self.parts, acks, books), log)
        if code:
            return f"did not reach its end (exit {code}): {log.read_text()[-600:]}"
        found = json.loads(books.read_text())
        for name in _SAME:
            if found[name] != expected[name]:
                return f"{name}: {found[name]} instead of {expected[name]}"
        if found["fell_back"]:
            return f"fell back: {found['fell_back']}"
        lost = found["uncounted"] if self.fault == "power" else found["unrecorded"]
        return f"{lost} of {found['answered']} answered calls are lost" if lost else None

    def clear(self) -> None:
        for path in [*self.work.glob("state*"), *self.work.glob("cut-*"), self._file("log")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _killed(self, number: int, seconds: float | None) -> int:
        """Live until the point of this number, or so many seconds."""
        state, acks = self.work / "state", self.work / "state.acks"
        passed = itertools.count()

        def before(_point: str) -> None:
            if next(passed) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        def work() -> None:
            if seconds is None:
                Changes(state / "runs", before).watch()
            else:
                threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            whole_life(state, self.parts, acks, self._file("books"))

        return in_child(work, self._file("log"))

    def _cut(self, number: int) -> None:
        state, acks = self.work / "state", self.work / "state.acks"
        power = PowerCut(state)
        passed, one_at_a_time = itertools.count(), threading.Lock()

        def before(_point: str) -> None:
            with one_at_a_time:
                if next(passed) == number:
                    cut()

        def cut() -> None:
            for variant in range(VARIANTS):
                if acks.exists():
                    shutil.copy(acks, self.work / f"cut-{variant}.acks")
                draw = random.Random(f"{number}-{variant}") if variant else None
                power.copy(self.work / f"cut-{variant}", draw)
            os.kill(os.getpid(), signal.SIGKILL)

        def work() -> None:
            Changes(state / "runs", before, None if self.forgetful else power.synced).watch()
            whole_life(state, self.parts, acks, self._file("books"))

        in_child(work, self._file("log"))

    def _file(self, name: str) -> Path:
        return self.work / f"{name}.txt"


def measure(
    name: str, results: Path, every: int, minutes: float, *, forgetful: bool = False
) -> dict[str, Any]:
    """Run a part, or go on with it; the file of its results is written after each point."""
    path, began = results / f"{name}.json", time.monotonic()
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"points": {}, "seconds": 0.0}
    before = done["seconds"]
    with tempfile.TemporaryDirectory(
        prefix="insitu-rig-", dir=_MEMORY if _MEMORY.is_dir() else None
    ) as folder:
        work = Path(folder)
        build_model(work / "model", VOCABULARY, 0)
        publication: Any = name.partition("-")[2]
        sweep = Sweep(
            name, work, Parts(work / "model", StandinScores(work / "model"), publication), forgetful
        )
        expected, points = sweep.reference()
        for number in range(0, len(points), every):
            if str(number) in done["points"]:
                continue
            if time.monotonic() - began > minutes * 60:
                break
            sweep.clear()
            outcomes = {
                which: sweep.judge(state, expected) for which, state in sweep.faults(number, points[number])
            }
            done["points"][str(number)] = {"at": points[number], "outcomes": outcomes}
            done |= {"num_points": len(points), "every": every, "seconds": before + time.monotonic() - began}
            path.write_text(json.dumps(done, indent=1))
            wrong = {which: what for which, what in outcomes.items() if what}
            print(
                f"{name} {number}/{len(points)} {points[number]}: {wrong or 'ok'}",
                file=sys.stderr,
                flush=True,
            )
    outcomes = [what for point in done["points"].values() for what in point["outcomes"].values()]
    return {
        "part": name,
        "points": len(done["points"]),
        "of": done.get("num_points"),
        "faults": len(outcomes),
        "wrong": sum(what is not None for what in outcomes),
        "seconds": round(done["seconds"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=[])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--every", type=int, default=1, help="only every so many points")
    parser.add_argument("--minutes", type=float, default=30, help="of each part")
    parser.add_argument("--forgetful", action="store_true", help="a disk without fsync: power cuts must fail")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name in options.part:
        figures = measure(name, options.results, options.every, options.minutes, forgetful=options.forgetful)
        wrong += figures["wrong"]
        print(json.dumps(figures) if options.json else figures)
    if options.table:
        write_table(options.results)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
