"""Runs of the demo's project on a real backend, to look at in a browser.

    python -m tests.support.demo_runs --folder F

Trains `adder`, prints as one line of JSON where everything is, and stays until stdin is closed. Every line on
stdin trains the next run of `OTHERS`; a line on stdout says that it has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from insitu.access.key_changes import create_key
from insitu.access.scopes import Scope
from insitu.demo.commands import CONFIG_FILE, MODEL_NAME
from insitu.demo.demo import write_project
from insitu.system.processes import tail
from insitu.testing.models import smollm2
from tests.support.backend import Backend, running_backend
from tests.support.finetuning import merged

FEWER = {"data/train.json": 8, "data/validation.json": 6}
"""Questions to train on and to validate with: adapters are slow on a CPU."""
_SMALL = {"groups_per_step": FEWER["data/train.json"]}
FIRST = ("adder", {"finetuning": {"num_epochs": 6, **_SMALL}})
OTHERS = (("timid", {"finetuning": {"num_epochs": 3, **_SMALL}, "training": {"learning_rate": 1e-4}}),)
_ENGINE = ("--max-seq-length", "512", "--max-num-seqs", "64")
_ADAPTERS = ("--publication", "adapter", "--placement", "dedicated")
"""Several runs are served at once, and any of their steps can be promoted."""
_VALIDATION = "--validation_samples=2"
_END_SECONDS = 30.0


def configure(project: Path, backend: Backend, name: str, changes: Mapping[str, Any]) -> Path:
    """Write the run's configuration file beside the demo's own."""
    own = {
        "model": {"base_url": f"{backend.gateway_url}/v1"},
        "backend": {"name": name, "port": backend.port},
        "finetuning": {"output_dir": f"runs/{name}"},
    }
    config = merged(merged(yaml.safe_load((project / CONFIG_FILE).read_text()), own), changes)
    path = project / f"{name}.yml"
    path.write_text(yaml.safe_dump(config))
    return path


async def finetune(config: Path, *options: str) -> None:
    """Train as a user would; raise with the last lines of its output if that fails."""
    log = config.with_suffix(".log")
    command = [sys.executable, "-m", "insitu.cli", "finetune"]
    command += [f"--config_file={config.name}", *options]
    with log.open("wb") as out:
        child = await asyncio.create_subprocess_exec(*command, cwd=config.parent, stdout=out, stderr=out)
    try:
        code = await child.wait()
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGINT)
            async with asyncio.timeout(_END_SECONDS):
                await child.wait()
    if code != 0:
        raise RuntimeError(f"insitu finetune of {config.name} ended with exit code {code}:\n{tail(log)}")


async def stay(folder: Path) -> None:
    """Train the first run, then one for every line on stdin, until it is closed."""
    model, project, state = smollm2(), folder / "project", folder / "state"
    write_project(project)
    for name, number in FEWER.items():
        path = project / name
        path.write_text(json.dumps(json.loads(path.read_text())[:number]))
    arguments = ["--model", str(model), "--model-name", MODEL_NAME, *_ENGINE, *_ADAPTERS]
    async with running_backend(state, *arguments) as backend:
        name, changes = FIRST
        config = configure(project, backend, name, changes)
        await finetune(config, _VALIDATION)
        places = {
            "api": f"{backend.api_url}/",
            "keys": {
                "submit": create_key(state, "looker", [Scope.SUBMIT])[0],
                "admin": create_key(state, "chief", [Scope.ADMIN])[0],
            },
            "runs": str(project / "runs"),
            "config": str(config),
            "project": str(project),
            "tokenizer": str(model),
        }
        print(json.dumps(places), flush=True)
        for name, changes in OTHERS:
            if not await asyncio.to_thread(sys.stdin.readline):
                return
            await finetune(configure(project, backend, name, changes), _VALIDATION)
            print(name, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    asyncio.run(stay(parser.parse_args().folder))


if __name__ == "__main__":
    main()
