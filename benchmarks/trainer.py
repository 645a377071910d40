"""Compare the trainer with a bare torch loop and with TRL, steps of all sides in turn.

    python benchmarks/trainer.py --json [--workload prompt|turns] [--dtype float32|bfloat16] [--rounds 3]

SmolLM2-135M, LoRA r=8 on all linear layers, DAPO loss, on the CPU. Two workloads of 8 rollouts: *prompt* (400
tokens that all share, then 40 sampled) and *turns* (150 shared tokens, then four turns of 40 sampled and 40
tool tokens, stored as a call each). *bare* is a loop written by hand over insitu's own packed rows with a
dense mask, stock Transformers and PEFT; *trl* is the loss, clipping and optimizer of TRL's `GRPOTrainer` on
one padded row per rollout with its tool mask, set up to be as fast as possible on a CPU; `--installed` adds
TRL's own settings.

Each side has a process, and steps alternate between them, so that noise of the machine affects all alike.
The first step warms up, and its gradients must agree: all sides compute the same update. Ratios are insitu's
throughput over the other side's, the median over the rounds. Those that have a bound are compared with it,
and insitu's peak memory (resident, without loading) with the peak of *bare* and *trl*.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from trainer_data import WORKLOADS

from insitu.backend.plan.compute import this_cpu

HERE = Path(__file__).parent
BOUNDS = {
    "prompt": {"throughput_over_bare": 0.95, "throughput_over_trl": 3.0},
    "turns": {"throughput_over_bare": 0.95},
}
"""Lower bounds by workload; insitu's peak memory must not exceed any other side's."""
AGREEMENT = {"float32": 1e-3, "bfloat16": 0.1}
"""The largest allowed difference between gradients, relative to their norm."""
PAIRS = 3
"""Steps of insitu and bare per step of TRL in a round: they are short, and close to each other."""
DEADLINE_SECONDS = 1200.0
Figures = dict[str, float]


class Side:
    """The process of one side."""

    def __init__(self, name: str, folder: Path, command: list[str]) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.loaded = self._read()

    def step(self) -> Figures:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: reading reports that
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> Figures:
        assert self._process.stdout is not None
        deadline = threading.Timer(DEADLINE_SECONDS, self._process.kill)
        deadline.start()
        try:
            line = self._process.stdout.readline()
        finally:
            deadline.cancel()
        if not line:
            raise SystemExit(f"{self.name} ended:\n{self._log.read_text()[-2000:]}")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def started(folder: Path, workload: str, names: list[str], dtype: str, threads: int) -> Iterator[list[Side]]:
    data = [sys.executable, str(HERE / "trainer_data.py"), workload, str(folder), str(threads)]
    subprocess.run(data, check=True, timeout=DEADLINE_SECONDS)
    sides: list[Side] = []
    try:
        for name in names:
            command = [sys.executable, str(HERE / "trainer_sides.py"), name, str(folder), dtype, str(threads)]
            sides.append(Side(name, folder, command))
        yield sides
    finally:
        for side in sides:
            side.end()


def measure(workload: str, names: list[str], dtype: str, rounds: int, threads: int) -> dict[str, Any]:
    steps: dict[str, list[Figures]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory(prefix="insitu-trainer-") as scratch,
        started(Path(scratch), workload, names, dtype, threads) as sides,
    ):
        first = {side.name: side.step() for side in sides}
        steps_agree(Path(scratch), first, AGREEMENT[dtype])
        for number in range(rounds):
            turns = sides[:2] * PAIRS + sides[2:]
            for side in turns if number % 2 else reversed(turns):
                steps[side.name].append(side.step())
                print(f"{workload} {side.name} {steps[side.name][-1]['seconds']:.2f} s", file=sys.stderr)
        loaded = {side.name: side.loaded["loaded_mib"] for side in sides}
        differences = {name: difference(Path(scratch), name) for name in names[1:]}
        num_tokens = json.loads((Path(scratch) / "tokens.json").read_text())
    return summary(BOUNDS[workload], steps, loaded, num_tokens) | {"gradient_difference": differences}


def difference(folder: Path, side: str) -> float:
    """Compute |g - insitu's g| / |insitu's g| over all trained tensors."""
    ours, theirs = (load_file(folder / f"gradient-{name}.safetensors") for name in ("insitu", side))
    if ours.keys() != theirs.keys():
        raise SystemExit(
            f"insitu and {side} train different tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}"
        )
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    return (apart / sum(float(gradient.double().square().sum()) for gradient in ours.values())) ** 0.5


def steps_agree(folder: Path, first: dict[str, Figures], bound: float) -> None:
    """Exit with the figures unless all sides have the same gradient, before and after clipping."""
    norm = first["insitu"]["grad_norm"]
    for side in [name for name in first if name != "insitu"]:
        apart, of_norms = difference(folder, side), abs(first[side]["grad_norm"] / norm - 1)
        if not (apart <= bound and of_norms <= bound):
            raise SystemExit(
                f"insitu and {side} do not compute the same: gradients differ by {apart:.2e}, their norms "
                f"({norm:.5f} and {first[side]['grad_norm']:.5f}) by {of_norms:.2e}; allowed is {bound:.0e}"
            )


def summary(
    bounds: Figures, steps: dict[str, list[Figures]], loaded: Figures, num_tokens: dict[str, int]
) -> dict[str, Any]:
    seconds = {side: [step["seconds"] for step in each] for side, each in steps.items()}
    middle = {side: statistics.median(each) for side, each in seconds.items()}
    peaks = {side: max(step["peak_mib"] for step in each) for side, each in steps.items()}

    def ratio(side: str) -> float:
        """Compare each step with the steps of insitu beside it: one, or all of the round."""
        span = len(seconds["insitu"]) // len(seconds[side])
        near = [statistics.median(seconds["insitu"][i * span :][:span]) for i in range(len(seconds[side]))]
        return statistics.median(a / b for a, b in zip(seconds[side], near, strict=True))

    figures = {f"throughput_over_{side}": round(ratio(side), 3) for side in steps if side != "insitu"}
    met = {name: figures[name] >= bound for name, bound in bounds.items()}
    met |= {f"peak_mib_{side}": peaks["insitu"] <= peaks[side] for side in ("bare", "trl")}
    return figures | {
        "fastest_seconds": {side: round(min(each), 3) for side, each in seconds.items()},
        "median_seconds": {side: round(value, 3) for side, value in middle.items()},
        "seconds": {side: [round(value, 3) for value in each] for side, each in seconds.items()},
        "tokens_per_second": {side: round(num_tokens["calls"] / value, 1) for side, value in middle.items()},
        "num_tokens": num_tokens,
        "peak_mib": {side: round(value) for side, value in peaks.items()},
        "loaded_mib": {side: round(value) for side, value in loaded.items()},
        "met": met,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--dtype", choices=list(AGREEMENT), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--installed", action="store_true", help="also measure TRL with its own settings")
    given = parser.parse_args()
    names = ["insitu", "bare", "trl", *(["trl_installed"] if given.installed else [])]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave no process or directory behind
    figures: dict[str, Any] = {"dtype": given.dtype, "threads": given.threads, "cpu": this_cpu()}
    for workload in list(WORKLOADS) if given.workload == "all" else [given.workload]:
        figures[workload] = measure(workload, names, given.dtype, given.rounds, given.threads)
    if given.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")
    parts = [part for part in figures.values() if isinstance(part, dict)]
    raise SystemExit(0 if all(all(part["met"].values()) for part in parts) else 1)


if __name__ == "__main__":
    main()
