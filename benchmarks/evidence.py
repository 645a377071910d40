"""Train the benchmark tasks with real parts, and keep what was measured: one JSON file per part.

    python benchmarks/evidence.py --json --part guess-0 tictactoe-1 [--results DIR] [--minutes 30] [--steps N]
    python benchmarks/evidence.py --json --short            # two small updates of one task, as a check
    python benchmarks/evidence.py --table                   # write the table of docs/evidence.md, run nothing

A part is `<task>-<seed>` or `<task>-<seed>-<settings>`, with the settings of `benchmarks/evidence_part.py`.
It starts `insitu serve` with SmolLM2-135M and runs `insitu finetune` on the task's YAML, with a validation on
held-out examples before and after. A part that runs out of its minutes is stopped, and the same command
resumes it. `--steps` ends a part early, with a validation; without it, the same command goes on from there. A
part whose file says that it is complete is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.evidence_part import PLANNED, Part  # noqa: E402
from benchmarks.evidence_results import greedy, result_of, validations  # noqa: E402
from benchmarks.evidence_table import write_table  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from insitu.testing.models import smollm2  # noqa: E402
from tests.support.backend import Backend, running_backend  # noqa: E402

SERVE = ("--model-name", "smollm2", "--max-seq-length", "512", "--max-num-seqs", "64")
SHORT_MINUTES = 5
STOP_SECONDS = 60
EVAL_SECONDS = 600
GREEDY = {"greedy": "play", "greedy_shots": "play_with_shots"}
"""Measurements at temperature 0, by the task's entry: as trained, and with demonstrations in the prompt."""
PAGE = ROOT / "docs" / "evidence.md"


@dataclass(frozen=True, slots=True)
class Run:
    """A part, the directory with its files, and how much of it to run."""

    part: Part
    work: Path
    minutes: float
    overrides: dict[str, str]
    num_held_out: int | None = None
    """Validate on so many examples; None: on all."""
    samples: int = 4
    """Rollouts of each of them."""

    @property
    def output(self) -> Path:
        """The run directory of `insitu finetune`."""
        return self.work / "output"

    @property
    def held_out(self) -> Path:
        """The examples to validate on."""
        return self.work / "held_out.json"


def finetune_command(run: Run, backend: Backend) -> list[str]:
    """Return the command that a user would run, with this backend's addresses and the part's overrides."""
    samples = ["--validation_interval=1000", f"--validation_samples={run.samples}"]
    return ["finetune", *_files(run), *samples, *_flags(run, backend)]


def eval_command(run: Run, backend: Backend, step: int, folder: Path, *more: str) -> list[str]:
    """Return the command that measures the base model and the trained one at temperature 0."""
    models = ["base", f"{run.part.name}@{step}", "--temperature=0", "--samples=1", f"--output_dir={folder}"]
    return ["eval", *models, *_files(run), *_flags(run, backend), *more]


def _files(run: Run) -> list[str]:
    return [
        f"--config_file=benchmarks/tasks/{run.part.task}.yml",
        f"--validation_dataset={run.held_out}",
    ]


def _flags(run: Run, backend: Backend) -> list[str]:
    part = run.part
    overrides = {
        "llms.player.base_url": f"{backend.gateway_url}/v1",
        "trainer_adapters.backend.backend.port": str(backend.port),
        "trainer_adapters.backend.backend.name": part.name,
        "finetuning.output_dir": str(run.output),
        **part.overrides,
        **run.overrides,
    }
    return [word for path, value in overrides.items() for word in ("-o", path, value)]


async def run_for(command: list[str], log: Path, seconds: float) -> tuple[int | None, float]:
    """Run the command for so long at most. Return its exit code, None if it was stopped, and the seconds."""
    began = time.monotonic()
    with log.open("ab") as out:
        cli = [sys.executable, "-m", "insitu.cli", *command]
        process = await asyncio.create_subprocess_exec(*cli, cwd=ROOT, stdout=out, stderr=out)
        try:
            code = await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            code = None
        finally:
            await _stop(process)
    return code, time.monotonic() - began


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the command as Ctrl-C does, and by force if that takes too long."""
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


async def train(run: Run, backend: Backend) -> dict[str, Any]:
    """Train a part on this backend, or go on with it, and return what has been measured."""
    run.held_out.write_text(json.dumps(run.part.held_out()[: run.num_held_out]))
    pieces, log = run.work / "seconds.json", run.work / "finetune.log"
    seconds: list[float] = json.loads(pieces.read_text()) if pieces.exists() else []
    code, took = await run_for(finetune_command(run, backend), log, 60 * run.minutes)
    seconds.append(took)
    pieces.write_text(json.dumps(seconds))
    if code not in (0, None):
        said = log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"insitu finetune of {run.part.name} ended with {code}:\n{said}")
    if code == 0:
        await measure_greedy(run, backend)
    return {
        "part": run.part.name,
        "task": run.part.task,
        "seed": run.part.seed,
        "settings": run.part.settings,
        "complete": code == 0,
        "minutes": sum(seconds) / 60,
        "machine": this_cpu(),
        **result_of(run.output),
        **{name: greedy(run.work / name) for name in GREEDY if (run.work / name).exists()},
    }


async def measure_greedy(run: Run, backend: Backend) -> None:
    """Measure the model before and after at temperature 0, with demonstrations too if the task has any."""
    step = validations(run.output)[-1]["step"]
    for name, entry in GREEDY.items():
        module = importlib.import_module(f"benchmarks.tasks.{run.part.task}")
        folder = run.work / name
        if folder.exists() or not hasattr(module, entry):
            continue
        more = ["-o", "workflow.entry", f"{module.__name__}:{entry}"]
        os.environ["INSITU_EVIDENCE_SEED"] = str(run.part.seed)  # which rows are demonstrations
        command = eval_command(run, backend, step, folder, *more)
        code, _ = await run_for(command, run.work / f"{name}.log", EVAL_SECONDS)
        if code != 0:
            shutil.rmtree(folder, ignore_errors=True)
            said = (run.work / f"{name}.log").read_text(errors="replace")[-2000:]
            raise SystemExit(f"insitu eval of {run.part.name} ended with {code}:\n{said}")


async def serve_and_train(run: Run) -> dict[str, Any]:
    """Train a part on a backend of its own, whose state is kept with it."""
    run.work.mkdir(parents=True, exist_ok=True)
    async with running_backend(run.work / "state", "--model", str(smollm2()), *SERVE) as backend:
        return await train(run, backend)


def measure(part: Part, results: Path, minutes: float, steps: int | None) -> dict[str, Any]:
    """Return the part's result: the one on file if it is complete; `steps`: end after so many updates."""
    path, work = results / f"{part.name}.json", results / part.name
    if path.exists() and (known := json.loads(path.read_text()))["complete"]:
        return known
    overrides = {} if steps is None else {"finetuning.max_steps": str(steps)}
    result = asyncio.run(serve_and_train(Run(part, work, minutes, overrides)))
    result["complete"] = result["complete"] and steps is None
    path.write_text(json.dumps(result, indent=1) + "\n")
    if result["complete"]:
        shutil.rmtree(work / "state", ignore_errors=True)  # checkpoints; the rollouts stay
    return result


def short_run(work: Path) -> Run:
    """Return two small updates, so that every part of the way is known to work: too short to learn from."""
    overrides = {"finetuning.max_steps": "2", "finetuning.groups_per_step": "2"}
    return Run(Part("search", 0), work, SHORT_MINUTES, overrides, num_held_out=8, samples=1)


def short() -> dict[str, Any]:
    """Make the short run in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="insitu-evidence-") as work:
        return asyncio.run(serve_and_train(short_run(Path(work))))


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print a result, in one line or for people."""
    if as_json:
        print(json.dumps(result), flush=True)
        return
    ended = "" if result["complete"] else " (stopped: the same command goes on)"
    print(f"{result['part']}: {result['rollouts']} rollouts, {result['minutes']:.1f} minutes{ended}")
    print("  reward by step " + " ".join(f"{point['reward']:.2f}" for point in result["curve"]))
    for name in ("before", "after"):
        if name in result:
            shown = ", ".join(f"{key} {value:.3f}" for key, value in result[name]["figures"].items())
            print(f"  {name} (step {result[name]['step']}): {shown}")
    print(f"  {result.get('sentence', 'Not measured after training yet.')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=[], help=f"names, such as {', '.join(PLANNED)}")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--minutes", type=float, default=30, help="stop each part after so many")
    parser.add_argument("--steps", type=int, help="end each part after so many updates")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--table", action="store_true", help="write the table of docs/evidence.md")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        parts = [Part.of(name) for name in options.part]
    except ValueError as error:
        parser.error(str(error))
    if not (parts or options.short or options.table):
        parser.error("give --part, --short or --table")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no backend behind
    options.results.mkdir(parents=True, exist_ok=True)
    for part in parts:
        show(measure(part, options.results, options.minutes, options.steps), options.json)
    if options.short:
        show(short(), options.json)
    if options.table:
        write_table(PAGE, options.results)


if __name__ == "__main__":
    main()
