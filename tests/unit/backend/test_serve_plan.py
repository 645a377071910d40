"""The plan reaches engine, replicas and trainer: at the start, and when a registration changes something."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import CpuFacts
from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.layouts import Wanted
from insitu.backend.plan.memory import GIB
from insitu.backend.plan.models.files import CannotPlan
from insitu.backend.plan.serve_plan import planned, registered_engine, settings_for
from insitu.backend.plan.settings import ServeSettings
from insitu.errors import CannotHonour
from tests.support.known_models import CONFIGS

FACTS = CpuFacts("x86_64", frozenset({"avx2"}), tuple((cpu,) for cpu in range(16)))


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2.5-7b"]))
    return str(tmp_path)


def on_gpus(model: str | None, count: int, gib: int, wanted: Wanted | None = None) -> ServeSettings:
    return ServeSettings(
        Path("/nowhere"),
        "cuda",
        choose(FACTS, "cuda", Asked()),
        "adapter",
        "shared",
        "default",
        model=model,
        machine=Machine(count, gib * GIB),
        wanted=wanted or Wanted(),
        enforce_eager=False,
    )


def test_the_plan_sets_everything(model: str) -> None:
    settings, plan = planned(on_gpus(model, 8, 80), model)
    assert plan is not None
    assert (settings.num_replicas, settings.num_ranks, settings.tensor_parallel_size) == (8, 8, 1)
    assert settings.compute.rank_threads == 2, "16 cores are shared by 8 ranks"
    engine = settings.preloaded()
    assert engine is not None
    command = engine.command(1)
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.92"
    assert command[command.index("--max-model-len") + 1] == "32768"
    assert command[command.index("--max-num-seqs") + 1] == "256"


def test_the_trainer_gets_the_budget(model: str) -> None:
    pytest.importorskip("ray", reason="trainer ranks are Ray actors")
    from insitu.backend.fleet.trainer import TrainerGroup

    settings, plan = planned(on_gpus(model, 1, 24, Wanted(micro_batch_tokens=4096)), model)
    assert plan is not None
    arguments = TrainerGroup(settings, model)._arguments(0, "127.0.0.1", 1)
    assert arguments.get("max_micro_batch_tokens") == 4096
    assert arguments.get("checkpoint_layers") is True
    assert arguments.get("kept_tokens") == 0
    roomy, _ = planned(on_gpus(model, 1, 80), model)
    kept = TrainerGroup(roomy, model)._arguments(0, "127.0.0.1", 1).get("kept_tokens")
    assert kept == roomy.kept_tokens > 8192
    assert "four_bit" not in arguments
    four_bit = replace(settings, four_bit_base=True)
    assert TrainerGroup(four_bit, model)._arguments(0, "127.0.0.1", 1).get("four_bit") is True


def test_a_registration_without_arguments_changes_nothing(model: str) -> None:
    settings, _ = planned(on_gpus(model, 1, 24), model)
    base = settings.engine(model, "m")
    assert registered_engine(settings, base, {}, {}, 16) == base
    beside = settings_for(settings, base)
    assert replace(beside, wanted=settings.wanted) == settings


def test_a_larger_rank_shortens_what_nobody_pinned(model: str) -> None:
    settings, _ = planned(on_gpus(model, 1, 24), model)
    base = settings.engine(model, "m")
    engine = registered_engine(settings, base, {}, {}, 128)
    assert engine.max_lora_rank == 128
    assert 1024 < engine.max_model_len < base.max_model_len
    pinned = replace(settings, wanted=Wanted(max_seq_length=base.max_model_len))
    with pytest.raises(CannotHonour, match=f"--max-seq-length {base.max_model_len} does not fit"):
        registered_engine(pinned, base, {}, {}, 128)


def test_more_adapters_at_once_leave_less_for_calls(model: str) -> None:
    few, many = (planned(on_gpus(model, 1, 24, Wanted(max_loras=number)), model)[1] for number in (4, 16))
    assert few is not None
    assert many is not None
    assert many.kv_tokens < few.kv_tokens


def test_a_registration_s_own_settings(model: str) -> None:
    settings, _ = planned(on_gpus(model, 2, 24), model)
    base = settings.engine(model, "m")
    engine = registered_engine(
        settings,
        base,
        {"tensor_parallel_size": 2, "max_num_seqs": 8},
        {"max_seq_length": 2048, "micro_batch_tokens": 3000},
        16,
    )
    assert (engine.tensor_parallel_size, engine.max_model_len, engine.max_num_seqs) == (2, 2048, 8)
    beside = settings_for(settings, engine)
    assert (beside.num_replicas, beside.num_ranks, beside.micro_batch_tokens) == (1, 2, 3000)
    with pytest.raises(CannotHonour, match="does not fit"):
        registered_engine(settings, base, {}, {"max_seq_length": 32768}, 16)


def test_a_second_run_without_arguments_keeps_the_first_one_s_engine(model: str) -> None:
    settings, _ = planned(on_gpus(model, 1, 24), model)
    first = registered_engine(settings, settings.engine(model, "m"), {}, {"max_seq_length": 4096}, 16)
    assert registered_engine(settings, first, {}, {}, 8) == first


def test_a_model_that_is_loaded_later_is_planned_then(model: str) -> None:
    settings = on_gpus(None, 4, 80)
    assert planned(settings, model)[0].num_replicas == 4


def test_an_unknown_model_needs_the_user_s_figures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(CannotPlan, match="unheard_of"):
        planned(on_gpus(str(tmp_path), 1, 24), str(tmp_path))
    given = Wanted(max_seq_length=4096, micro_batch_tokens=4096, gpu_memory_utilization=0.8)
    settings, plan = planned(on_gpus(str(tmp_path), 1, 24, given), str(tmp_path))
    assert plan is None
    assert settings.checkpoint_layers, "nobody knows what its layers hold"
    off = replace(on_gpus(str(tmp_path), 1, 24, given), checkpoint_layers=False)
    assert planned(off, str(tmp_path))[0].checkpoint_layers is False
    later = on_gpus(None, 1, 24, given)
    assert settings_for(later, settings.engine(str(tmp_path), "m")).checkpoint_layers
    assert settings_for(settings, settings.engine(str(tmp_path), "m")) == settings


def test_a_cpu_has_no_share_of_a_gpu() -> None:
    settings = ServeSettings(
        Path("/nowhere"), "cpu", choose(FACTS, "cpu", Asked()), "merged", "shared", "default"
    )
    settings.check()
    for changed in (replace(settings, gpu_memory_utilization=0.5), replace(settings, tensor_parallel_size=2)):
        with pytest.raises(CannotHonour, match="runs on a CPU"):
            changed.check()
    engine = registered_engine(settings, settings.engine("m", "m"), {}, {"micro_batch_tokens": 512}, 16)
    assert settings_for(settings, engine).micro_batch_tokens == 512


def test_a_registration_s_own_deadlines(model: str) -> None:
    asked = {"step_seconds": 7200, "publish_seconds": 1800}
    on_cpu = ServeSettings(
        Path("/nowhere"), "cpu", choose(FACTS, "cpu", Asked()), "merged", "shared", "default"
    )
    for settings in (on_cpu, planned(on_gpus(model, 1, 24), model)[0]):
        engine = registered_engine(settings, settings.engine(model, "m"), {}, asked, 16)
        found = settings_for(settings, engine).deadlines
        assert found == replace(settings.deadlines, step=7200, publish=1800)
        assert "7200" not in engine.command(1)
    with pytest.raises(CannotHonour, match="step_seconds=0 is not a positive whole number"):
        registered_engine(on_cpu, on_cpu.engine("m", "m"), {}, {"step_seconds": 0}, 16)
