"""InsituBackend sends ART's messages as the API reads them, with stand-ins for ART's own classes."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from insitu.backend.ledger import Ledger
from insitu.errors import InvalidRequest
from insitu.records.store import RecordStore
from insitu.types import ModelCall
from tests.unit.api.conftest import KEY

from .test_art_routes import ASKED, finish, trained


@dataclass
class StandinTrainResult:
    step: int
    metrics: dict[str, float]


class StandinGroup:
    def __init__(self, *trajectories: dict[str, Any]) -> None:
        self._trajectories = list(trajectories)

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        return {"trajectories": self._trajectories, "exceptions": []}


@pytest.fixture
def compat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    types = ModuleType("art.types")
    types.TrainResult = StandinTrainResult  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "art", ModuleType("art"))
    monkeypatch.setitem(sys.modules, "art.types", types)
    monkeypatch.delitem(sys.modules, "insitu.compat.art", raising=False)
    return importlib.import_module("insitu.compat.art")


@pytest.mark.timeout(20)
async def test_a_model_is_registered_trained_and_cleaned_up(
    compat: ModuleType,
    server: str,
    ledger: Ledger,
    records: RecordStore,
    make_call: Callable[..., ModelCall],
) -> None:
    answer = {"role": "assistant", "content": "8"}
    made = [
        make_call(f"call-{n}", logprobs=[-0.5, -float(n)], messages=[ASKED], answer=answer) for n in (1, 2)
    ]
    records.append(made)
    config = {"peft_args": {"r": 4}, "init_args": {"max_seq_length": 64}}
    other = SimpleNamespace(
        name="other", project="p", base_model="m", inference_model_name=None, _internal_config=config
    )
    model = SimpleNamespace(name="run", project="project", base_model="model", inference_model_name=None)
    async with compat.InsituBackend(server, KEY) as backend:
        await backend.register(other)
        assert ledger.get_run("other").lora.rank == 4
        assert ledger.get_run("other").init_args == {"max_seq_length": 64}
        group = StandinGroup(trained(1.0, -0.5, -1.0), trained(0.0, -0.5, -2.0), trained(0.0, -9.0))
        training = asyncio.create_task(
            backend.train(model, [group], learning_rate=1e-3, epsilon=0.1, verbose=True)
        )
        await finish(ledger, 1)
        assert await training == StandinTrainResult(
            1, {"loss": 0.5, "reward/mean": 0.5, "account/refused": 1.0}
        )
        (step,) = ledger.steps("run")
        job = ledger.get_job(step.job_id)
        assert (job.settings.learning_rate, job.settings.clip_low) == (1e-3, 0.1)
        await backend._delete_checkpoint_files(model, [1])
        assert await backend._get_step(model) == 1
        with pytest.raises(InvalidRequest, match="trajectory_groups"):
            await backend.train(model, [])
