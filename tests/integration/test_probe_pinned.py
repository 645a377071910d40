"""An engine that keeps its old weights is found out by the probe at the first step."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import aiohttp
import pytest

from insitu.errors import ChildFailed
from insitu.testing.models import tiny
from insitu.types import StepSettings
from tests.support.addition import Rollouts, sample_groups, spread_rewards, train
from tests.support.backend import running_backend

PINNED = """
from insitu.backend.fleet.replica import EngineClient

async def keep_old_weights(self, directory, version):  # fault injection: says the new version, loads nothing
    await self.set_version(version)

EngineClient.reload_weights = keep_old_weights
from insitu.cli import main
main()
"""


@pytest.mark.sweep
@pytest.mark.timeout(400)
async def test_pinned_sampler_fails_the_first_step(tmp_path: Path) -> None:
    launcher = tmp_path / "pinned.py"
    launcher.write_text(PINNED)
    arguments = [
        "--model",
        str(tiny()),
        "--model-name",
        "tiny",
        "--dtype",
        "float32",
        "--max-seq-length",
        "256",
    ]
    # The plain threshold is set out of reach: the engine's standing still alone must tell.
    arguments += ["--probe-threshold", "1000"]
    command = (sys.executable, str(launcher))
    async with running_backend(tmp_path / "state", *arguments, command=command) as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            await client.register_run("pinned", "tiny")
            await client.wait_run_ready("pinned", 400)
            rollouts = Rollouts(http, backend.gateway_url, "pinned", max_tokens=8)
            groups = await sample_groups(rollouts, [("Say something.", "7")] * 2, 4)
            rated = [spread_rewards(group) for group in groups]
            with pytest.raises(ChildFailed, match="still answers with the old weights"):
                await train(client, rated, StepSettings(learning_rate=1e-4))
            run = await client.get_run("pinned")
            assert run.step == 0
            states = [(await client.get_group("pinned", group.id)).state for group in rated]
            assert states == ["received", "received"]
            # The old version answers on: nothing was routed to the failed one.
            text, call_id = await rollouts.chat(
                uuid.uuid4().hex, [{"role": "user", "content": "Still there?"}]
            )
            assert call_id
