"""The registrar loads no other model, and brings back what was replaced in vain or is damaged."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the registrar starts engines, which are Ray actors")

from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger.rows import Run
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serving import registration
from insitu.backend.serving.host import DamagedStep
from insitu.backend.serving.registration import Registrar
from insitu.backend.serving.traffic import Traffic
from insitu.errors import CannotHonour, ChildFailed
from insitu.types import LoraSettings, RunState
from insitu.wire.routing_table import Served

COMPUTE = Compute("float32", (), 1, None, "")


class StandinHost:
    """Starts, unless its engine may have too many sequences at once."""

    def __init__(self, settings: ServeSettings, engine: EngineSettings, *_: object) -> None:
        self.settings, self.engine = settings, engine
        self.is_running = False
        self.replicas = SimpleNamespace(joined=list)

    async def start(self) -> None:
        if self.engine.max_num_seqs == 1000:
            raise ChildFailed("the engine ended at its start")
        self.is_running = True

    async def stop(self) -> None:
        self.is_running = False


class StandinTraffic:
    async def push(self) -> None:
        """Nobody listens."""


async def fits(*_: object) -> None:
    """Accept every placement."""


async def fits_nowhere(*_: object) -> None:
    raise CannotHonour("more GPUs than there are")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def registrar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Registrar:
    monkeypatch.setattr(registration, "ModelHost", StandinHost)
    monkeypatch.setattr(registration, "check_placement", fits)
    settings = ServeSettings(tmp_path, "cpu", COMPUTE, "adapter", "shared", "default", model="m")
    nothing: Any = None
    traffic: Any = StandinTraffic()
    return Registrar(settings, nothing, traffic, nothing, tmp_path, said.append)


async def loaded(registrar: Registrar) -> EngineSettings:
    engine = registrar._settings.engine("m", "m")
    await registrar._load(engine)
    return engine


async def test_the_engine_before_comes_back_if_the_next_does_not_start(
    registrar: Registrar, said: list[str]
) -> None:
    engine = await loaded(registrar)
    with pytest.raises(ChildFailed):
        await registrar._load(replace(engine, max_num_seqs=1000))
    host: Any = registrar.host
    assert host is not None
    assert host.is_running
    assert host.engine == engine
    assert "the one before is started again" in said[0]


async def test_an_engine_without_a_place_stops_nothing(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await loaded(registrar)
    before: Any = registrar.host
    monkeypatch.setattr(registration, "check_placement", fits_nowhere)
    with pytest.raises(CannotHonour, match="more GPUs"):
        await registrar._load(replace(engine, max_num_seqs=2))
    assert registrar.host is before
    assert before.is_running


def fetched(_settings: ServeSettings, model: str) -> None:
    pytest.fail(f"{model} is fetched")


def test_a_started_backend_loads_no_other_model(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "planned", fetched)
    run: Any = SimpleNamespace(name="run", base_model="org/another")
    with pytest.raises(CannotHonour, match="is not the one that was started"):
        registrar._base_engine(run)


@pytest.mark.parametrize(
    "base_model", ["/etc", "../models/secret", "https://example.org/model", "a/b/c", "a/b\n"]
)
def test_a_path_or_an_address_is_no_base_model(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch, base_model: str
) -> None:
    monkeypatch.setattr(registration, "planned", fetched)
    registrar._settings = replace(registrar._settings, model=None)
    run: Any = SimpleNamespace(name="run", base_model=base_model)
    with pytest.raises(CannotHonour, match="is not a model name"):
        registrar._base_engine(run)


def of_rank(name: str, rank: int) -> Any:
    lora = LoraSettings(rank=rank)
    return Run(name, "project", "m", lora, {}, {}, RunState.READY, 0, None, 0.0, 0.0)


class StandinLedger:
    """Has open runs."""

    def __init__(self, *runs: Any) -> None:
        self.runs = runs

    def list_runs(self) -> tuple[Any, ...]:
        return self.runs

    def open_leases(self) -> list[Any]:
        return []

    def runs_with_open_jobs(self) -> set[str]:
        return {run.name for run in self.runs}


async def test_a_restart_takes_the_largest_rank_of_all_open_runs(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[str] = []

    async def admit(run: Run) -> None:
        admitted.append(run.name)

    monkeypatch.setattr(registrar, "_admit", admit)
    ledger: Any = StandinLedger(of_rank("oldest", 8), of_rank("large", 32), of_rank("newest", 8))
    registrar._ledger = registrar.activity._ledger = ledger
    await registrar.resume()
    assert registrar.host is not None
    assert registrar.host.engine.max_lora_rank == 32
    assert admitted == ["oldest", "large", "newest"]


async def test_without_a_model_the_first_run_starts_the_engines_for_the_ranks_of_all(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def admit(run: Run) -> None:
        base = EngineSettings("m", "m", "cpu", "float32", "adapter")
        asked.append(registrar._registered(base, run).max_lora_rank)

    monkeypatch.setattr(registrar, "_admit", admit)
    ledger: Any = StandinLedger(of_rank("oldest", 8), of_rank("large", 32))
    registrar._ledger = registrar.activity._ledger = ledger
    registrar._settings = replace(registrar._settings, model=None)
    await registrar.resume()
    assert asked == [32, 32]
    await admit(of_rank("later", 8))
    assert asked[-1] == 32, "an idle run may be called at any time"


async def test_a_rank_that_other_runs_leave_no_room_for_names_the_option(registrar: Registrar) -> None:
    await loaded(registrar)
    traffic: Any = SimpleNamespace(runs={"other": {}}, push=StandinTraffic().push)
    registrar._traffic = traffic
    with pytest.raises(CannotHonour, match=r"has LoRA rank 20; beside other runs .* up to 16") as raised:
        registrar._wanted_engine(of_rank("large", 20))
    assert raised.value.hint == "start the backend with --max-lora-rank 32, or use rank 16"
    registrar._settings = replace(registrar._settings, max_lora_rank=20)
    await loaded(registrar)
    assert registrar._wanted_engine(of_rank("large", 20)).max_lora_rank == 32


async def test_layers_that_the_engine_would_not_serve_are_rejected_before_it_starts(
    registrar: Registrar,
) -> None:
    registrar._settings = replace(registrar._settings, model="m", lora_modules=("k_proj", "q_proj"))
    traffic: Any = SimpleNamespace(runs={})
    registrar._traffic = traffic
    experts = of_rank("experts", 8)
    experts = replace(experts, lora=replace(experts.lora, target_modules=["q_proj", "gate_proj"]))
    with pytest.raises(CannotHonour, match=r"gate_proj cannot be adapted in this model") as raised:
        registrar._wanted_engine(replace(experts, base_model="m"))
    assert "choose from k_proj, q_proj" in (raised.value.hint or "")
    assert registrar.host is None, "nothing was started for it"
    attention = replace(experts, lora=replace(experts.lora, target_modules=["q_proj"]), base_model="m")
    assert registrar._wanted_engine(attention).lora_modules == ("k_proj", "q_proj")


async def test_a_damaged_last_step_is_fallen_back_from(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    last: Any = SimpleNamespace(name="run", step=3)
    whole: Any = SimpleNamespace(name="run", step=2)

    async def publish(run: Run) -> str:
        if run is last:
            raise DamagedStep("state.json has another hash")
        return f"run@{run.step}"

    host: Any = SimpleNamespace(publish_committed=publish)
    monkeypatch.setattr(registration, "fall_back", lambda *_: (whole, "run falls back to step 2"))
    assert await registrar._publish(last, host) == (whole, "run@2")
    assert said == ["run falls back to step 2"]


class DroppingHost(StandinHost):
    """Notes what is freed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.freed: list[str] = []
        self.trainer = SimpleNamespace(forget_run=self.forget)

    async def forget(self, run: str) -> None:
        self.freed.append(f"forget {run}")

    async def reset(self) -> None:
        self.freed.append("reset")


async def test_a_project_with_many_new_runs_delays_neither_anothers_run_nor_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServeSettings(tmp_path, "cpu", COMPUTE, "adapter", "shared", "default", model="m")
    nothing: Any = None
    with Ledger(ledger_url(tmp_path, None)) as ledger:
        traffic = QuietTraffic(nothing, ["http://nowhere"], "key", 1.0, 1.0)
        registrar = Registrar(settings, ledger, traffic, nothing, tmp_path, lambda _text: None)
        for name in (*(f"a~{number}" for number in range(40)), "b~mine", "operators"):
            ledger.register_run("default", name, "m", LoraSettings(), {}, {})
        admitted: list[str] = []

        async def admit(run: Run) -> None:
            admitted.append(run.name)
            await asyncio.sleep(0.05)
            ledger.transition_run(run.name, RunState.FAILED, "by this test")

        monkeypatch.setattr(registrar, "_admit", admit)
        monkeypatch.setattr(registration, "_ADMITTING_SECONDS", 0.2)
        began = time.monotonic()
        await registrar.admit_runs()
        assert time.monotonic() - began < 1.5, "then a step has its turn"
        assert set(admitted[:3]) == {"a~0", "b~mine", "operators"}
        assert len(admitted) < 42
        while len(admitted) < 42:
            await registrar.admit_runs()
        assert sorted(admitted) == sorted({*admitted}), "each once"


class QuietTraffic(Traffic):
    """Has no gateway to tell."""

    async def push(self) -> None:
        """Send nothing."""

    async def offer(self) -> None:
        """Send nothing."""

    async def drained(self, deadline_seconds: float, version: str | None = None) -> None:
        """No call is in flight."""


def dropping(registrar: Registrar, tmp_path: Path, known: list[Any]) -> DroppingHost:
    """A backend with merged weights that serves `run@3`, whose ledger knows these runs."""
    settings: Any = registrar._settings
    host = DroppingHost(settings, settings.engine("m", "m"))
    traffic = QuietTraffic(None, ["http://nowhere"], "key", 1.0, 1.0)  # type: ignore[arg-type]
    traffic.serve_version("run", 3, Served("m", "run@3"))
    (tmp_path / "runs" / "run" / "merged" / "000003").mkdir(parents=True)
    registrar._settings = replace(settings, publication="merged")
    registrar._traffic = traffic
    registrar._ledger = SimpleNamespace(
        live_runs=lambda: known,
        get_run=lambda _name: known[0],
        current_promotions=dict,
        runs_with_open_jobs=set,
    )  # type: ignore[assignment]
    registrar._promotions._ledger = registrar.activity._ledger = registrar._ledger
    registrar.host = host  # type: ignore[assignment]
    return host


async def test_a_deleted_run_is_served_no_more(registrar: Registrar, tmp_path: Path) -> None:
    host = dropping(registrar, tmp_path, [])
    await registrar.admit_runs()
    assert registrar._traffic.runs == {}
    assert host.freed == ["forget run", "reset"]
    assert not (tmp_path / "runs" / "run" / "merged").exists()


async def test_a_run_of_the_same_name_starts_from_nothing_of_the_deleted_one(
    registrar: Registrar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new: Any = SimpleNamespace(name="run", project="p", base_model="m", state=RunState.REGISTERED)
    host = dropping(registrar, tmp_path, [new])
    admitted: list[str] = []

    async def admit(run: Run) -> None:
        admitted.append(f"{run.name} after {host.freed}")

    monkeypatch.setattr(registrar, "_admit", admit)
    await registrar.admit_runs()
    assert admitted == ["run after ['forget run', 'reset']"]


async def test_a_registration_that_raises_anything_ends_its_run_only(
    registrar: Registrar, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def odd(*_: object) -> None:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(registrar, "_wanted_engine", odd)
    with Ledger(ledger_url(tmp_path, None)) as ledger:
        registrar._ledger = ledger
        ledger.register_run("p", "odd", "m", None, {}, {})
        await registrar._admit(ledger.get_run("odd"))
        failed = ledger.get_run("odd")
    assert failed.state is RunState.FAILED
    assert failed.error is not None
    assert "OverflowError" in failed.error
