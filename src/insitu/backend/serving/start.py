"""Step 0 of a run that starts from something: a checkpoint of its own, copied from the source.

A crash before the ledger has recorded it leaves files that the next attempt replaces. Once it is recorded the
source may go: it is never read again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson

from insitu.backend.ledger import Ledger, Run
from insitu.backend.ledger.adapter_files import uploaded_adapter
from insitu.backend.serving.host import ModelHost
from insitu.errors import CannotHonour
from insitu.types import parse_policy
from insitu.wire.starts.peft_config import PeftConfig
from insitu.wire.values import UPLOADED


async def write_start(run: Run, host: ModelHost, ledger: Ledger) -> None:
    """Write the run's step 0, unless it is there. On shared devices, hold and drain calls first."""
    kept = await asyncio.to_thread(ledger.checkpoints, run.name)
    if run.source is None or any(checkpoint.step == 0 for checkpoint in kept):
        return
    source = await asyncio.to_thread(_source, run.source, host)
    await asyncio.to_thread(_check_fits, run, source, host)
    async with host.lease.handover(), host.lease.trainer():
        await host.trainer.start_run(run.name, run.lora, source, whole=run.fork_from is not None)
        path, digest = await host.save_checkpoint(run.name, 0)
    await asyncio.to_thread(ledger.commit_start, run.name, str(path), digest)


def _source(text: str, host: ModelHost) -> Path:
    if text.startswith(UPLOADED):
        return uploaded_adapter(host.settings.state_dir, text.removeprefix(UPLOADED))
    name, step = parse_policy(text)
    assert step is not None, "a source names its step"
    return host.kept_checkpoint(name, step)


def _check_fits(run: Run, source: Path, host: ModelHost) -> None:
    """Reject an adapter on other layers than the run's, or of a base model that is named otherwise."""
    config = PeftConfig.read(orjson.loads((source / "adapter" / "adapter_config.json").read_bytes()))
    mine = run.lora.targets(host.trainer.linear_layers)
    its = sorted(config.target_modules or [])
    if mine != its:
        raise CannotHonour(
            f"run {run.name} cannot start from {run.source}: lora.target_modules is {its} there, and "
            f"{mine} in this run",
            hint="leave `lora` out to take the settings of the source",
        )
    names = (run.base_model, host.engine.model, host.engine.served_name)
    if run.source and run.source.startswith(UPLOADED) and config.names_another_model(names):
        raise CannotHonour(
            f"run {run.name} cannot start from {run.source}: it was trained on {config.base_model}, and this "
            f"backend serves {host.engine.served_name}",
            hint="if both are the same model, correct base_model_name_or_path in its adapter_config.json",
        )
