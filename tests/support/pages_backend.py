"""The state directory of a small backend for the browser tests of the API's pages.

The API that serves it is the real one. Its runs are in a real ledger; `status.json`, which the supervisor
would write, is a stand-in's:

    python -m tests.support.pages_backend --state-dir D
    python -m tests.support.pages_backend --state-dir D --train puzzle    # commits the next step of a run
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from insitu.access.key_changes import create_key
from insitu.access.scopes import Scope
from insitu.backend.ledger import Ledger, ledger_url
from insitu.types import JobState, LoraSettings, RunState, StepSettings, Trajectory, TrajectoryGroup

NAMES = ("adder", "puzzle")


def furnish(state_dir: Path) -> dict[str, str]:
    """Write ledger and status; return a key of each kind that the tests log in with."""
    state_dir.mkdir(parents=True, exist_ok=True)
    with Ledger(ledger_url(state_dir)) as ledger:
        for name in NAMES:
            ledger.register_run("default", name, "tiny", LoraSettings(), {}, {})
            ledger.transition_run(name, RunState.LOADING)
            ledger.transition_run(name, RunState.READY)
        for _ in range(3):
            train(ledger, state_dir, "adder")
    (state_dir / "status.json").write_text(json.dumps(STATUS))
    return {
        "submit": create_key(state_dir, "looker", [Scope.SUBMIT])[0],
        "admin": create_key(state_dir, "chief", [Scope.ADMIN])[0],
    }


def train(ledger: Ledger, state_dir: Path, run: str) -> None:
    """Commit the next step of a run, with figures and without a file."""
    step = ledger.get_run(run).step + 1
    group = TrajectoryGroup(f"g{step}", run, [Trajectory(f"r{step}", ["inline:x"], 1.0)])
    ledger.put_group(group, f"g{step}")
    job = ledger.create_job(run, f"step{step}", [f"g{step}"], StepSettings(), "h")
    ledger.transition_job(job.id, JobState.RUNNING)
    path = state_dir / "runs" / run / "checkpoints" / f"{step:06d}"
    path.mkdir(parents=True)
    ledger.commit_step(job.id, step, FIGURES | {"reward/mean": step / 4}, str(path), "0" * 64)


FIGURES = {
    "reward/std": 0.2,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "loss": -0.5,
    "entropy": 1.5,
    "grad_norm": 0.3,
    "mismatch/kl": 1e-5,
    "num_tokens": 640.0,
    "staleness/max": 0.0,
    "account/trajectories": 64.0,
    "account/trained": 48.0,
    "account/zero_variance": 16.0,
    "time/collect_seconds": 0.5,
    "time/train_seconds": 6.0,
    "time/publish_seconds": 1.5,
    "time/step_seconds": 8.0,
}
STATUS = {
    "state": "ready",
    "waiting": None,
    "pid": 4001,
    "processes": {"gateway": 4002, "api": 4003},
    "gateway": {
        "epoch": 7,
        "held": 2,
        "in_flight": {"adder@3": 4, "adder@2": 1},
        "in_flight_total": 5,
        "recorded": 12345,
        "record_backlog": 3,
        "put_back": {},
        "leaving": {},
        "replicas": {
            "replica-0": {"healthy": True, "in_flight": 4},
            "replica-1": {"healthy": False, "in_flight": 1},
        },
    },
    "gateway_port": 8000,
    "deleted_calls": 0,
    "model": "tiny",
    "replicas": {
        "replica-0": {"pid": 4010, "joined": True, "versions": ["base", "adder@2", "adder@3"]},
        "replica-1": {"pid": 4011, "joined": False, "versions": ["base", "adder@2"]},
    },
    "trainer": [
        {
            "rank": rank,
            "world_size": 2,
            "base_model": "tiny",
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 2,
            "load_seconds": 1.5,
            "vocabulary_size": 64,
            "max_length": 512,
            "max_micro_batch_tokens": 4096,
            "can_branch": True,
            "linear_layers": ["q_proj"],
            "runs": {"adder": {"step": 3, "lora": {"rank": 8}}},
            "pid": 4020 + rank,
        }
        for rank in (0, 1)
    ],
}
"""As the supervisor writes it: `Supervisor._write_status`."""


def main() -> None:
    """Write the directory and print the keys as JSON, or commit a step in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--train", metavar="RUN")
    given = parser.parse_args()
    if given.train is None:
        print(json.dumps(furnish(given.state_dir)))
        return
    with Ledger(ledger_url(given.state_dir)) as ledger:
        train(ledger, given.state_dir, given.train)


if __name__ == "__main__":
    main()
