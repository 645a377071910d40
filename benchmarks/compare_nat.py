"""Run the same agent, data and settings through `nat finetune` 1.9.0 and `insitu finetune` on one backend.

    make compat                          # once: builds the environment of the original
    python benchmarks/compare_nat.py     # prints a Markdown table; some minutes on two cores

`insitu serve` serves a tiny random model (float32, real vLLM). The agent is the LangChain one of
`tests/compat/nat_addition`. For insitu its file goes through `insitu migrate`, and the manual changes follow
the command's instructions, with the functions of `examples/from_nemo`. Of the six rows, one does not fit
into the model's context and one makes the reward function raise. Each command runs three times: to its end,
killed after the first step and started again, and against a base model that nobody serves.

Every figure is read from the backend's databases or from the files that the command left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.compare_sides import (  # noqa: E402
    NUM_EPOCHS,
    NUM_GENERATIONS,
    InsituSide,
    NatSide,
    Side,
    backend_figures,
    kept_rollouts,
    stored_rollouts,
    write_project,
)
from insitu.backend.ledger import Ledger, ledger_url  # noqa: E402
from insitu.system.paths import cache_dir  # noqa: E402
from insitu.system.processes import free_port  # noqa: E402
from insitu.testing.models import tiny  # noqa: E402
from tests.compat.environment import NAT  # noqa: E402
from tests.compat.nat_client import GATEWAY_PORT  # noqa: E402
from tests.support.backend import running_backend  # noqa: E402


@dataclass
class Seen:
    """The results of one command."""

    side: Side
    exit_code: int
    figures: dict[str, Any]
    """From the backend."""
    steps_when_killed: int
    steps_after: int
    exit_code_of_failure: int


@asynccontextmanager
async def standin(state_dir: Path) -> AsyncIterator[int]:
    """Serve without vLLM: nothing is trained, and every prompt fits."""
    port = free_port()
    ports = ["--port", str(port), "--gateway-port", str(GATEWAY_PORT)]
    texts = [part for text in ("4", "7", "13") for part in ("--text", text)]
    command = [sys.executable, "-m", "tests.support.standin_backend", "--state-dir", str(state_dir)]
    process = subprocess.Popen([*command, *ports, *texts], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        await asyncio.to_thread(lambda: any(line == "ready\n" for line in process.stdout or ()))
        yield port
    finally:
        process.terminate()
        process.wait(20)


@asynccontextmanager
async def served(state_dir: Path) -> AsyncIterator[int]:
    """Run `insitu serve` with the tiny model; adapters, because several runs are open at once."""
    model = ("--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32", "--max-seq-length", "256")
    adapters = ("--publication", "adapter")
    async with running_backend(state_dir, *model, *adapters, gateway_port=GATEWAY_PORT) as backend:
        yield backend.port


def num_steps(state_dir: Path, run: str) -> int:
    with Ledger(ledger_url(state_dir)) as ledger:
        return len(ledger.steps(run)) if any(each.name == run for each in ledger.list_runs()) else 0


def watch(kind: type[Side], name: str, scratch: Path, port: int) -> Seen:
    """Run the command three times."""
    state_dir = scratch / "state"

    def prepared(run: str, base_model: str = "tiny") -> Side:
        write_project(scratch / run)
        side = kind(scratch / run, run, port, base_model)
        if isinstance(side, InsituSide):
            side.migrate()
        return side

    say(f"{name}: to the end")
    whole = prepared(name)
    exit_code = whole.finish()
    say(f"{name}: killed after the first step, and again")
    killed = prepared(f"{name}-killed")
    killed.kill_when(lambda: num_steps(state_dir, killed.run) > 0)
    before = num_steps(state_dir, killed.run)
    killed.finish()
    say(f"{name}: a base model that nobody serves")
    failing = prepared(f"{name}-failing", "nobody/serves-this").finish()
    figures = backend_figures(state_dir, name)
    return Seen(whole, exit_code, figures, before, num_steps(state_dir, killed.run), failing)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows(nat: Seen, insitu: Seen) -> Iterable[tuple[Any, ...]]:
    """Return the rows of the table: the subject, then one value per side."""
    ours = stored_rollouts(insitu.side)
    endings = Counter(str(entry.ending) for entry in ours)
    failed = {name: count for name, count in endings.items() if name not in ("completed", "length")}
    planned = 6 * NUM_GENERATIONS * NUM_EPOCHS
    both = (nat.figures, insitu.figures)
    yield ("rollouts planned (6 rows × 4 × 3 epochs)", planned, planned)
    yield ("rollouts in the files of the command", kept_rollouts(nat.side), len(ours))
    yield ("model calls recorded by the gateway, validation included", *(f["calls"] for f in both))
    yield ("… of which it knows the rollout", *(f["calls_of_a_rollout"] for f in both))
    yield ("trajectories uploaded", *(f["trajectories"] for f in both))
    yield ("trajectories trained", *(_sum(f, "account/trained") for f in both))
    yield ("tokens trained", *(f["tokens"] for f in both))
    yield ("failed rollouts and rewards, as reported", "not reported", _words(failed))
    yield ("answers cut off at max_tokens: recorded", *(f["cut_off"] for f in both))
    yield ("… as reported by the command", "not reported", endings.get("length", 0))
    yield (
        "policy versions of the trained calls, as reported",
        "not reported",
        _list(insitu.figures["versions"]),
    )
    yield (
        "learning rate of the steps (`training.learning_rate: 1e-3`)",
        *(_list(f["learning_rates"]) for f in both),
    )
    yield ("steps committed", *(f["steps"] for f in both))
    yield ("mean reward by epoch, as reported", *(_rewards(seen.side) for seen in (nat, insitu)))
    yield ("… of what was trained on, by the backend", *(_list(f["rewards"]) for f in both))
    yield ("validation rewards", *(_validation(seen.side) for seen in (nat, insitu)))
    yield (
        f"killed after step 1, same command again: steps for {NUM_EPOCHS} epochs",
        *(seen.steps_after for seen in (nat, insitu)),
    )
    yield ("exit code, trained", nat.exit_code, insitu.exit_code)
    yield ("exit code, base model that nobody serves", nat.exit_code_of_failure, insitu.exit_code_of_failure)
    yield ("seconds, to the end", *(f"{seen.side.seconds:.0f}" for seen in (nat, insitu)))


def _sum(figures: dict[str, Any], name: str) -> int:
    return int(sum(metrics.get(name, 0) for metrics in figures["metrics"]))


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} `{name}`" for name, count in sorted(counts.items())) or "none"


def _list(values: Iterable[float | None]) -> str:
    return ", ".join("none" if value is None else f"{value:.3g}" for value in values) or "none"


def _rewards(side: Side) -> str:
    return _list(epoch["avg_reward"] for epoch in side.epochs())


def _validation(side: Side) -> str:
    history = side.read_json("validation_history.json")
    return (
        ", ".join(
            "none"
            if entry["avg_reward"] is None
            else f"{entry['avg_reward']:.3g} ({entry['num_examples']} rows)"
            for entry in history
        )
        or "none"
    )


async def compare(scratch: Path, use_standin: bool) -> str:
    backend = standin if use_standin else served
    async with backend(scratch / "state") as port:
        nat = await asyncio.to_thread(watch, NatSide, "by-nat", scratch, port)
        insitu = await asyncio.to_thread(watch, InsituSide, "by-insitu", scratch, port)
    say(json.dumps({"nat": nat.figures, "insitu": insitu.figures}, default=str))
    lines = ["| | `nat finetune` 1.9.0 | `insitu finetune` |", "|---|---|---|"]
    lines += [f"| {what} | {there} | {here} |" for what, there, here in rows(nat, insitu)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--standin", action="store_true", help="a backend that trains nothing, without vLLM")
    parser.add_argument("--keep", type=Path, help="leave everything in this directory")
    arguments = parser.parse_args()
    if not NAT.ready:
        sys.exit(NAT.why_not)
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f"port-{GATEWAY_PORT}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the original insists on this port
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True)
            print(asyncio.run(compare(arguments.keep, arguments.standin)))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                print(asyncio.run(compare(Path(scratch), arguments.standin)))


if __name__ == "__main__":
    main()
