"""`insitu plan` and the start of `insitu serve`: the table, the settings, and what is rejected at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from insitu.backend.plan.devices import machine
from insitu.backend.plan.devices.machine import Gpu
from insitu.backend.plan.settings import ServeSettings
from insitu.cli import cli
from insitu.errors import CannotHonour, NotFound
from tests.support.known_models import CONFIGS


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "qwen"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIGS["qwen2.5-7b"]))
    return str(directory)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_cuda", lambda: True)
    cards = [Gpu(index, f"GPU-{index}", "RTX 4090", 24 * 2**30) for index in (0, 1)]
    monkeypatch.setattr(machine, "list_gpus", lambda: cards)
    monkeypatch.setattr(machine, "host_memory", lambda: 128 * 2**30)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_a_plan_for_another_machine(model: str) -> None:
    result = run("plan", "--model", model, "--device-memory", "24GiB")
    assert result.exit_code == 0, result.output
    assert "(7.6B parameters) on 1 GPU of 24.0 GiB" in result.output
    assert "--gpu-memory-utilization 0.92 --max-seq-length 11264" in result.output
    assert "layers are checkpointed" in result.output


def test_the_planned_options_give_the_same_plan(model: str) -> None:
    first = run("plan", "--model", model, "--device-memory", "48GiB", "--num-devices", "4")
    line = next(line for line in first.output.splitlines() if "--replicas" in line)
    again = run("plan", "--model", model, "--device-memory", "48GiB", "--num-devices", "4", *line.split()[1:])
    assert again.output == first.output


def test_a_rejection_has_an_exit_code_and_needs_no_torch(model: str) -> None:
    program = (
        "import sys; from insitu.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    asked = ["plan", "--model", model, "--device-memory", "16GiB"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *asked], check=False, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "does not fit on 1 GPU of 16.0 GiB" in ended.stderr
    assert "next: 2 such GPUs fit" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("size", ["24", "24XB", "many"])
def test_sizes_have_units(model: str, size: str) -> None:
    result = run("plan", "--model", model, "--device-memory", size)
    assert result.exit_code == 2
    assert "is not a size such as 24GiB" in result.output


@pytest.mark.usefixtures("two_gpus")
def test_this_machine_s_gpus(model: str) -> None:
    result = run("plan", "--model", model)
    assert "on 2 GPUs of 24.0 GiB" in result.output
    assert "together of 128.0 GiB" in result.output
    assert "on 1 GPU of 24.0 GiB" in run("plan", "--model", model, "--num-devices", "1").output
    assert isinstance(run("plan", "--model", model, "--num-devices", "3").exception, CannotHonour)


def test_a_cpu(model: str) -> None:
    result = run("plan", "--model", model, "--device", "cpu", "--host-memory", "256GiB", "--dtype", "float32")
    assert "on a CPU in float32" in result.output
    assert "--max-seq-length 2048 --micro-batch-tokens 2048" in result.output


def test_a_missing_gpu_is_said(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    result = run("plan", "--model", model, "--device", "cuda")
    assert isinstance(result.exception, CannotHonour)
    assert "no NVIDIA device" in str(result.exception)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ServeSettings]:
    """Catch the settings where the supervisor would start."""
    backend = pytest.importorskip("insitu.backend.serve", reason="the supervisor needs Ray")
    caught: list[ServeSettings] = []

    def catch(settings: ServeSettings, *_: object) -> None:
        settings.check()
        caught.append(settings)

    monkeypatch.setattr(backend, "serve", catch)
    monkeypatch.setenv("INSITU_STATE_DIR", str(tmp_path / "state"))
    return caught


@pytest.mark.usefixtures("two_gpus")
def test_serve_plans_before_anything_starts(model: str, served: list[ServeSettings]) -> None:
    result = run("serve", "--model", model)
    assert result.exit_code == 0, result.output
    assert "on 2 GPUs of 24.0 GiB" in result.output
    assert result.output.splitlines()[0] == f"   0 s  checking the model {model}"
    (settings,) = served
    assert (settings.num_replicas, settings.num_ranks, settings.tensor_parallel_size) == (2, 2, 1)
    assert (settings.max_num_seqs, settings.checkpoint_layers) == (256, True)
    assert settings.max_seq_length > 8704
    rejected = run("serve", "--model", model, "--max-seq-length", "32768")
    assert isinstance(rejected.exception, CannotHonour)
    assert len(served) == 1


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "done"), [("on", True), ("off", False)])
def test_layers_are_checkpointed_as_asked(
    asked: str, done: bool, model: str, served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--model", model, "--checkpoint-layers", asked, "--max-seq-length", "1024")
    assert run("serve", *arguments).exit_code == 0
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    monkeypatch.setattr(machine, "host_memory", lambda: 128 * 2**30)
    assert run("serve", *arguments).exit_code == 0
    assert [settings.checkpoint_layers for settings in served] == [done, done]
    said = "layers are checkpointed" if done else "layers are not checkpointed"
    assert said in run("plan", *arguments).output


@pytest.mark.usefixtures("two_gpus")
def test_every_knob_of_serve(model: str, served: list[ServeSettings]) -> None:
    knobs = {
        "--tensor-parallel-size": "2",
        "--gpu-memory-utilization": "0.8",
        "--micro-batch-tokens": "3000",
        "--max-seq-length": "2048",
        "--max-num-seqs": "32",
        "--step-seconds": "60",
        "--trainer-start-seconds": "61",
        "--engine-start-seconds": "62",
        "--score-seconds": "63",
        "--publish-seconds": "64",
        "--handover-seconds": "65",
        "--engine-silent-seconds": "66",
    }
    result = run("serve", "--model", model, *[part for pair in knobs.items() for part in pair])
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert (settings.tensor_parallel_size, settings.gpu_memory_utilization) == (2, 0.8)
    assert (settings.micro_batch_tokens, settings.max_seq_length, settings.max_num_seqs) == (3000, 2048, 32)
    deadlines = settings.deadlines
    assert (deadlines.step, deadlines.trainer_start, deadlines.engine_start) == (60, 61, 62)
    assert (deadlines.score, deadlines.publish, deadlines.handover) == (63, 64, 65)
    assert deadlines.engine_silent == 66
    rejected = run("serve", "--model", model, "--step-seconds", "0")
    assert "--step-seconds 0: a deadline is above 0 seconds" in str(rejected.exception)


def test_serve_on_a_cpu(model: str, served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    monkeypatch.setattr(machine, "host_memory", lambda: 128 * 2**30)
    assert run("serve", "--model", model).exit_code == 0
    (settings,) = served
    assert (settings.max_seq_length, settings.max_num_seqs, settings.micro_batch_tokens) == (2048, 64, None)
    assert (settings.num_replicas, settings.num_ranks, settings.machine) == (1, 1, None)
    monkeypatch.setattr(machine, "host_memory", lambda: 8 * 2**30)
    assert "of RAM" in str(run("serve", "--model", model).exception)
    assert "runs on a CPU" in str(run("serve", "--gpu-memory-utilization", "0.5").exception)


def test_serve_of_a_missing_model(served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_cuda", lambda: False)
    rejected = run("serve", "--model", "./nowhere").exception
    assert isinstance(rejected, NotFound)
    assert "./nowhere is neither a directory here" in str(rejected)
    assert served == []
