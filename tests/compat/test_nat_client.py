"""The unmodified client of the NeMo Agent Toolkit 1.9.0 trains a tiny model on a real backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.backend.ledger import Ledger, ledger_url
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.wire.answers import StepInfo
from tests.compat.environment import NAT
from tests.compat.nat_client import GATEWAY_PORT, NatClient
from tests.support.backend import running_backend

pytestmark = pytest.mark.skipif(not NAT.ready, reason=NAT.why_not)
NUM_EPOCHS = 3


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("port_8000")
async def test_three_epochs_train_and_both_sides_report_the_same_reward(tmp_path: Path):
    arguments = ("--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "256")
    async with running_backend(
        tmp_path / "state", *arguments, "--dtype", "float32", gateway_port=GATEWAY_PORT
    ) as backend:
        nat = NatClient(tmp_path / "nat", backend.port)
        assert await nat.finetune() == 0, nat.said()
        async with backend.client() as client:
            steps = await client.steps(nat.run)
            kept = await client.checkpoints(nat.run)
        stranger = NatClient(tmp_path / "other", backend.port, run="other", base_model="nobody/knows")
        await stranger.finetune(120)
        assert "422" in stranger.said(), "a base model that is not served is refused when it is prepared"
    assert [step.step for step in steps] == list(range(1, NUM_EPOCHS + 1)), nat.said()
    reported = [epoch["avg_reward"] for epoch in nat.epochs()]
    assert [step.metrics["reward/mean"] for step in steps] == pytest.approx(reported, abs=1e-9)
    weights = {next(Path(c.path).rglob("adapter_model.safetensors")).read_bytes() for c in kept}
    assert len(weights) == len(kept) >= 2, "every step changes the weights"
    _every_trained_token_is_recorded(tmp_path / "state", steps)


def _every_trained_token_is_recorded(state_dir: Path, steps: list[StepInfo]) -> None:
    records = RecordStore(f"sqlite:///{state_dir}/calls.db")
    try:
        with Ledger(ledger_url(state_dir)) as ledger:
            for step in steps:
                groups = ledger.groups_of_job(step.job_id)
                named = [c for group in groups for t in group.trajectories for c in t.call_ids]
                assert len(set(named)) == len(named) == 16, "4 examples, 4 generations, one call each"
                calls = records.get(named)
                assert {(call.run, call.policy_step) for call in calls} == {("compat", step.step - 1)}
                accounted = (
                    step.metrics["account/calls_trained"] + step.metrics["account/calls_zero_variance"]
                )
                assert accounted == 16
                assert step.metrics["account/calls_trained"] > 0
                # In float32 another token, mask or template would show in the trainer's own logprobs.
                assert step.metrics["mismatch/mean_abs"] < 1e-4
    finally:
        records.close()
