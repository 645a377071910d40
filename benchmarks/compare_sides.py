"""The two sides of `compare_nat.py`: run each command on the same project and read its files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from insitu.backend.batch import make_batch
from insitu.backend.ledger import Ledger, ledger_url
from insitu.harness.files.rollout_store import RolloutStore
from insitu.records.store import RecordStore
from tests.compat.environment import NAT, ROOT
from tests.compat.nat_client import GATEWAY_PORT

CONFIG = ROOT / "tests" / "compat" / "nat_addition" / "config.yml"
MODULE = ROOT / "examples" / "from_nemo"
NUM_EXAMPLES = 4
NUM_GENERATIONS = 4
NUM_EPOCHS = 3
KEY = "default"


def write_project(directory: Path) -> None:
    """Write questions, two rows that must fail (one too long, one that cannot be scored), and the YAML."""
    directory.mkdir(parents=True)
    generator = random.Random(0)
    pairs = [(generator.randint(1, 9), generator.randint(1, 9)) for _ in range(NUM_EXAMPLES + 3)]
    rows = [
        {
            "id": f"sum-{n}",
            "question": f"What is {a} + {b}? Reply with the number only.",
            "answer": str(a + b),
        }
        for n, (a, b) in enumerate(pairs)
    ]
    long = {"id": "too-long", "question": "What is one and one and " + "one " * 400, "answer": "2"}
    unscorable = {"id": "unscorable", "question": "What is 1 + 1?", "answer": "("}
    (directory / "questions.json").write_text(json.dumps([*rows[:NUM_EXAMPLES], long, unscorable]))
    (directory / "validation.json").write_text(json.dumps(rows[NUM_EXAMPLES:]))
    (directory / "config.yml").write_text(CONFIG.read_text())


@dataclass
class Side:
    """One command on the project, as one run of the backend."""

    directory: Path
    run: str
    api_port: int
    base_model: str = "tiny"
    gateway_port: int = GATEWAY_PORT
    seconds: float = 0.0

    def variables(self) -> dict[str, str]:
        return {
            "RUN_NAME": self.run,
            "GATEWAY_PORT": str(self.gateway_port),
            "API_PORT": str(self.api_port),
            "INSITU_KEY": KEY,
            "BASE_MODEL": self.base_model,
        }

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        raise NotImplementedError

    @property
    def log(self) -> Path:
        return self.directory / "client.log"

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the process; end it and its children afterwards."""
        began = time.monotonic()
        arguments = ["--validation_dataset", "validation.json", "--validation_interval", "1"]
        with self.log.open("ab") as out:
            process = subprocess.Popen(
                [*self.command(), *arguments],
                cwd=self.directory,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.seconds += time.monotonic() - began

    def finish(self, seconds: float = 400) -> int:
        """Run to the end; return the exit code."""
        with self.running() as process:
            return process.wait(seconds)

    def kill_when(self, reached: Callable[[], bool], seconds: float = 300) -> None:
        """Start, and `kill -9` as soon as the condition holds."""
        deadline = time.monotonic() + seconds
        with self.running() as process:
            while not reached() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)

    def read_json(self, name: str) -> Any:
        path = self.directory / "output" / name
        return json.loads(path.read_text()) if path.exists() else []

    def epochs(self) -> list[dict[str, Any]]:
        path = self.directory / "output" / "training_metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class NatSide(Side):
    """`nat finetune`, unmodified, in its own environment."""

    def command(self) -> list[str]:
        # At INFO this release recurses into its own log handler.
        return [NAT.program("nat"), "--log-level", "WARNING", "finetune", "--config_file", "config.yml"]

    def environment(self) -> dict[str, str]:
        return NAT.variables(self.directory) | self.variables()


class InsituSide(Side):
    """`insitu finetune` on the same file after `insitu migrate`.

    Nearly every answer of a random model is cut off; the original trains on those, so it is told to as well.
    """

    def command(self) -> list[str]:
        finetune = [sys.executable, "-m", "insitu.cli", "finetune", "--config_file", "config.insitu.yml"]
        return [*finetune, "-o", "trainer_adapters.art_adapter.training.mask_truncated", "false"]

    def environment(self) -> dict[str, str]:
        return os.environ | self.variables() | {"PYTHONPATH": str(MODULE)}

    def migrate(self) -> dict[str, Any]:
        """Run `insitu migrate` and apply its manual steps to the letter."""
        ran = subprocess.run(
            [sys.executable, "-m", "insitu.cli", "migrate", "config.yml", "--json"],
            cwd=self.directory,
            capture_output=True,
            text=True,
        )
        report = json.loads(ran.stdout)
        path = self.directory / "config.insitu.yml"
        config = yaml.safe_load(path.read_text())
        for note in report["by_hand"]:
            _put(config, yaml.safe_load(note["yaml"]))
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return report


def _put(config: dict[str, Any], said: dict[str, Any]) -> None:
    """Lay the YAML of a note over the configuration; an entry with a `_type` is replaced."""
    for key, value in said.items():
        if "_type" in value:
            config[key] = value
        else:
            _put(config[key], value)


def backend_figures(state_dir: Path, run: str) -> dict[str, Any]:
    """Read a run's figures from the backend's own databases."""
    records = RecordStore(f"sqlite:///{state_dir}/calls.db")
    try:
        calls = list(records.of_run(run, 0))
        with Ledger(ledger_url(state_dir)) as ledger:
            steps = ledger.steps(run)
            jobs = [ledger.get_job(step.job_id) for step in steps]
            uploads = [ledger.groups_of_job(job.id) for job in jobs]
        batches = [
            make_batch(groups, records, job.settings, step.step - 1)
            for groups, job, step in zip(uploads, jobs, steps, strict=True)
        ]
    finally:
        records.close()
    groups = [group for upload in uploads for group in upload]
    named = {call for group in groups for trajectory in group.trajectories for call in trajectory.call_ids}
    return {
        "calls": len(calls),
        "calls_of_a_rollout": sum(call.rollout_id is not None for call in calls),
        "cut_off": sum(call.finish_reason == "length" and call.id in named for call in calls),
        "versions": sorted({call.policy_step for call in calls if call.id in named}),
        "groups": len(groups),
        "trajectories": sum(len(group.trajectories) for group in groups),
        "endings": Counter(str(t.ending) for group in groups for t in group.trajectories),
        "tokens": sum(sum(each.mask) for batch in batches for each in batch.sequences),
        "steps": len(steps),
        "metrics": [step.metrics for step in steps],
        "rewards": [step.metrics.get("reward/mean") for step in steps],
        "learning_rates": sorted({job.settings.learning_rate for job in jobs}),
    }


def kept_rollouts(side: Side) -> int:
    """Read the file that `nat finetune` keeps: every evaluation overwrites the one before."""
    path = side.directory / "eval" / "workflow_output.json"
    return len(json.loads(path.read_text())) if path.exists() else 0


def stored_rollouts(side: Side) -> list[Any]:
    """Read every rollout that `insitu finetune` kept of its epochs."""
    rollouts: list[Any] = []
    for path in sorted((side.directory / "output" / "trajectories").glob("epoch-*.jsonl")):
        store = RolloutStore(path)
        rollouts += store.rollouts()
        store.close()
    return rollouts
