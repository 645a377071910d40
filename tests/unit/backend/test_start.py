"""Step 0 of a run that starts from something: written once, again after a crash, and only if it fits."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="the trainer's ranks are Ray actors")

from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.adapter_files import CONFIG, WEIGHTS, commit, stage
from insitu.backend.ledger.rows import Origin, Run
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.lease import DeviceLease
from insitu.backend.serving.publication import AdapterPublisher, MergedPublisher
from insitu.backend.serving.start import write_start
from insitu.errors import CannotHonour, CorruptCheckpoint, NotFound
from insitu.types import JobState, LoraSettings, RunState, StepSettings, TrajectoryGroup
from insitu.wire.routing_table import Served
from tests.support.peft_directory import write_peft

LORA = LoraSettings(2, 8)
LAYERS = ["k_proj", "q_proj"]


class StandinLease:
    """Nothing sleeps, and there is no engine."""

    @asynccontextmanager
    async def trainer(self) -> AsyncIterator[None]:
        yield

    handover = publication = trainer

    async def on_each(self, action: Callable[..., Any], **_: object) -> dict[int, object]:
        return {1: await action(self)}

    async def load_adapter(self, name: str, path: Path) -> None:
        self.loaded = (name, path)

    async def reload_weights(self, directory: Path, version: str) -> None:
        self.loaded = (version, directory)


class StandinTrainer:
    """Writes what it was started from."""

    def __init__(self) -> None:
        self.opened: dict[str, int] = {}
        self.linear_layers = LAYERS
        self.started: list[tuple[str, Path, bool]] = []
        self.exported: list[Path] = []

    async def start_run(self, run: str, lora: LoraSettings, source: Path, *, whole: bool) -> None:
        assert (lora.rank, lora.alpha) == (LORA.rank, LORA.alpha)
        self.started.append((run, source, whole))

    async def open_run(self, run: str, _lora: LoraSettings, step: int, _path: Path | None) -> None:
        self.opened[run] = step

    async def save(self, run: str, staging: Path) -> None:
        shutil.copytree({name: path for name, path, _ in self.started}[run] / "adapter", staging / "adapter")

    async def export_merged(self, _run: str, directory: Path) -> None:
        self.exported.append(directory)


@pytest.fixture
def host(tmp_path: Path, ledger: Ledger) -> ModelHost:
    settings = ServeSettings(
        tmp_path,
        "cpu",
        Compute("float32", (), 1, None, ""),
        "adapter",
        "shared",
        "default",
        model="org/model",
    )
    engine = settings.engine("org/model", "model")
    host = ModelHost(settings, engine, ledger, cast(Any, None), tmp_path)
    host.trainer = cast(TrainerGroup, StandinTrainer())
    host.lease = cast(DeviceLease, StandinLease())
    return host


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(ledger_url(tmp_path)) as opened:
        opened.register_run("p", "source", "model", LORA, {}, {})
        yield opened


@pytest.fixture
def source(tmp_path: Path, ledger: Ledger) -> Path:
    """The checkpoint of a trained run."""
    ledger.put_group(TrajectoryGroup("g", "source", []), "hash")
    job = ledger.create_job("source", "key", ["g"], StepSettings(), "request")
    ledger.transition_job(job.id, JobState.RUNNING)
    staging = checkpoints.stage(tmp_path / "runs", "source", 1)
    write_peft(staging / "adapter", target_modules=LAYERS)
    digest = checkpoints.commit(staging)
    path = tmp_path / "runs" / "source" / "checkpoints" / "000001"
    ledger.commit_step(job.id, 1, {}, str(path), digest)
    return path


def registered(ledger: Ledger, lora: LoraSettings | None = None, **origin: Any) -> Run:
    ledger.register_run(
        "p", "new", "model", lora, {}, {}, Origin(**{"init_from": None, "fork_from": None} | origin)
    )
    return ledger.transition_run("new", RunState.LOADING)


def uploaded(state_dir: Path, **config: Any) -> str:
    staging, digest = stage(state_dir), "d" * 64
    made = write_peft(state_dir / "mine", **config)
    shutil.copy(made / "adapter_config.json", staging / CONFIG)
    shutil.copy(made / "adapter_model.safetensors", staging / WEIGHTS)
    commit(staging, digest)
    return f"sha256:{digest}"


@pytest.mark.parametrize("fork", [False, True])
async def test_step_0_is_written_once(host: ModelHost, ledger: Ledger, source: Path, fork: bool) -> None:
    run = registered(ledger, **{"fork_from" if fork else "init_from": "source"})
    for _ in range(2):
        await write_start(run, host, ledger)
    trainer = cast(StandinTrainer, host.trainer)
    assert trainer.started == [("new", source, fork)]
    (kept,) = ledger.checkpoints("new")
    checkpoints.verify(Path(kept.path), kept.manifest_sha256)
    shutil.rmtree(source)  # it is a copy
    assert host.kept_checkpoint("new", 0) == Path(kept.path)


async def test_a_crash_before_the_record_is_repeated(
    host: ModelHost, ledger: Ledger, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = registered(ledger, init_from="source@1")
    with monkeypatch.context() as killed:
        killed.setattr(Ledger, "commit_start", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            await write_start(run, host, ledger)
    assert ledger.checkpoints("new") == []
    with pytest.raises(CorruptCheckpoint, match="no checkpoint of step 0"):
        host.kept_checkpoint("new", 0)
    await write_start(run, host, ledger)
    assert [checkpoint.step for checkpoint in ledger.checkpoints("new")] == [0]


async def test_a_run_from_the_base_model_has_no_checkpoint(host: ModelHost, ledger: Ledger) -> None:
    await write_start(ledger.get_run("source"), host, ledger)
    assert ledger.checkpoints("source") == []
    assert host.reference(ledger.get_run("source"), StepSettings(beta=0.1, reference_step=0)) is None


async def test_step_0_is_a_reference_only_where_it_is_named(
    host: ModelHost, ledger: Ledger, source: Path
) -> None:
    run = registered(ledger, init_from="source@1")
    await write_start(run, host, ledger)
    start = host.kept_checkpoint("new", 0)
    assert host.reference(run, StepSettings(beta=0.1, reference_step=0)) == start
    assert host.reference(run, StepSettings(beta=0.1)) is None
    assert host.reference(run, StepSettings(reference_step=0)) is None


@pytest.mark.parametrize("merged", [False, True])
async def test_step_0_is_published_as_any_other_step(
    host: ModelHost, ledger: Ledger, source: Path, tmp_path: Path, merged: bool
) -> None:
    base, lease = Served("model", "base"), cast(Any, host.lease)
    publisher = AdapterPublisher(lease, base)
    if merged:
        publisher = MergedPublisher(lease, base, str(tmp_path), host.trainer, host.settings.runs_dir)
    host.publisher = publisher
    run = registered(ledger, init_from="source@1")
    await write_start(run, host, ledger)
    served = await host.publish_committed(run)
    exported = [tmp_path / "runs" / "new" / "merged" / "000000"]
    if merged:
        assert served == Served("model", "new@0")
        assert lease.loaded == ("new@0", *exported)
    else:
        assert served == Served("new@0", "new@0")
        assert lease.loaded == ("new@0", host.kept_checkpoint("new", 0) / "adapter")
    assert cast(StandinTrainer, host.trainer).exported == (exported if merged else [])


async def test_other_layers_are_refused(host: ModelHost, ledger: Ledger, tmp_path: Path) -> None:
    name = uploaded(tmp_path, target_modules=["q_proj"])
    run = registered(ledger, LORA, init_from=name, uploaded=LoraSettings(2, 8, 0, ["q_proj"]))
    with pytest.raises(
        CannotHonour, match=r"target_modules is \['q_proj'\] there, and \['k_proj', 'q_proj'\]"
    ):
        await write_start(run, host, ledger)


@pytest.mark.parametrize(
    ("name", "fits"),
    [("org/model", True), ("model", True), ("/somewhere/else", True), (None, True), ("org/other", False)],
)
async def test_an_upload_of_another_model_is_refused(
    host: ModelHost, ledger: Ledger, tmp_path: Path, name: str | None, fits: bool
) -> None:
    upload = uploaded(tmp_path, target_modules=LAYERS, base_model_name_or_path=name)
    run = registered(ledger, init_from=upload, uploaded=LoraSettings(2, 8, 0, LAYERS))
    if fits:
        await write_start(run, host, ledger)
        assert json.loads((host.kept_checkpoint("new", 0) / CONFIG).read_text())["r"] == 2
        return
    with pytest.raises(CannotHonour, match="trained on org/other, and this backend serves model"):
        await write_start(run, host, ledger)


async def test_an_upload_that_is_gone_says_so(host: ModelHost, ledger: Ledger) -> None:
    run = registered(ledger, init_from="sha256:" + "e" * 64, uploaded=LORA)
    with pytest.raises(NotFound, match="has been removed"):
        await write_start(run, host, ledger)
