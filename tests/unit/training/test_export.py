"""Merged weights: base + scaling · B · A in float32, then rounded; complete, tied or untied, written once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.training.footprint.live_bytes import LiveBytes
from insitu.training.model import export
from insitu.training.model.rounding import round_stochastically, seed_of
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import train

Make = Callable[..., list[TrainingSequence]]
Build = Callable[..., Path]


def trained(model_dir: Path, make_sequences: Make, compute: str = "float32") -> TrainerRank:
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), compute, 1, "cpu", 64)
    rank.open_run("run", LoraSettings(rank=4, alpha=12))
    train(rank, "run", make_sequences(8), StepSettings(learning_rate=5e-2))
    return rank


def merged_by_hand(model_dir: Path, adapter_file: Path, scaling: float) -> dict[str, torch.Tensor]:
    weights = {name: t.float() for name, t in load_file(model_dir / "model.safetensors").items()}
    adapter = load_file(adapter_file)
    for key in (k for k in adapter if k.endswith(".lora_A.weight")):
        name = key.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[name] = weights[name] + scaling * (adapter[key.replace("lora_A", "lora_B")] @ adapter[key])
    return weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_equals_the_sum_in_float32_then_rounded(
    tied: bool, base_dtype: torch.dtype, dtype: str, build_model: Build, make_sequences: Make, tmp_path: Path
) -> None:
    model_dir = build_model(tmp_path / "model", tied, base_dtype)
    compute = "bfloat16" if base_dtype == torch.bfloat16 else "float32"
    rank = trained(model_dir, make_sequences, compute)
    rank.save("run", str(tmp_path / "saved"))
    rank.export_merged("run", str(tmp_path / "merged"), dtype)
    files = sorted((tmp_path / "merged").glob("*.safetensors"))
    written = {name: tensor for path in files for name, tensor in load_file(path).items()}
    adapter_file = tmp_path / "saved" / "adapter" / "adapter_model.safetensors"
    expected = merged_by_hand(model_dir, adapter_file, scaling=3.0)
    assert written.keys() == expected.keys()
    assert ("lm_head.weight" in written) is not tied
    adapted = load_file(tmp_path / "merged" / "model-adapted.safetensors").keys()
    for name, tensor in written.items():
        if name in adapted:
            seed = seed_of("run", 1, name)
            assert torch.equal(tensor, round_stochastically(expected[name], tensor.dtype, seed)), name
        else:
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    assert {tensor.dtype for tensor in written.values()} == {getattr(torch, dtype)}
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()


def test_the_export_is_a_model_that_scores_like_the_trainer(
    model_dir: Path, make_sequences: Make, tmp_path: Path
) -> None:
    rank = trained(model_dir, make_sequences)
    rank.export_merged("run", str(tmp_path), "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
    assert rank.score("run", ids.tolist())[0] == pytest.approx(logprobs.tolist(), abs=1e-5)


def test_unchanged_weights_are_written_once_and_linked(
    model_dir: Path, make_sequences: Make, tmp_path: Path
) -> None:
    rank = trained(model_dir, make_sequences)
    first, second = tmp_path / "1", tmp_path / "2"
    rank.export_merged("run", str(first), "bfloat16")
    adapted = (first / "model-adapted.safetensors").read_bytes()
    train(rank, "run", make_sequences(8, 1), StepSettings(learning_rate=5e-2))
    rank.export_merged("run", str(second), "bfloat16")
    assert (first / "model-frozen.safetensors").samefile(second / "model-frozen.safetensors")
    assert (first / "model-adapted.safetensors").read_bytes() == adapted
    assert (second / "model-adapted.safetensors").read_bytes() != adapted
    assert (second / "config.json").exists()
    rank.export_merged("run", str(second), "bfloat16")  # in place: the same directory again
    assert AutoModelForCausalLM.from_pretrained(second) is not None
    assert not list(tmp_path.rglob("*.partial"))


def test_files_are_the_bytes_of_safetensors_own_writer(
    model_dir: Path, make_sequences: Make, tmp_path: Path
) -> None:
    rank = trained(model_dir, make_sequences)
    rank.export_merged("run", str(tmp_path), "bfloat16")
    for path in sorted(tmp_path.glob("*.safetensors")):
        save_file(load_file(path), tmp_path / "again", metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / "again").read_bytes(), path.name


def wide_model(directory: Path) -> Path:
    """Enough weights for a share to be told from chance."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_small_update_arrives_which_rounding_to_nearest_would_lose(
    dtype: str, make_sequences: Make, tmp_path: Path
) -> None:
    """The share of ΔW that arrives is ⟨published - base, ΔW⟩ / ⟨ΔW, ΔW⟩."""
    model_dir = wide_model(tmp_path / "model")
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "bfloat16", 1, "cpu", 64)
    rank.open_run("run", LoraSettings(rank=4, alpha=12))
    train(rank, "run", make_sequences(8), StepSettings(learning_rate=5e-5 if dtype == "bfloat16" else 5e-6))
    rank.export_merged("run", str(tmp_path / "exact"), "float32")
    rank.export_merged("run", str(tmp_path / "rounded"), dtype)
    base = load_file(model_dir / "model.safetensors")
    rounded = load_file(tmp_path / "rounded" / export.ADAPTED_FILE)
    arrived = by_nearest = wanted = 0.0
    for name, exact in load_file(tmp_path / "exact" / export.ADAPTED_FILE).items():
        change = exact.double() - base[name].double()
        arrived += ((rounded[name].double() - base[name].double()) * change).sum().item()
        by_nearest += ((exact.to(getattr(torch, dtype)).double() - base[name].double()) * change).sum().item()
        wanted += (change * change).sum().item()
    assert 0.95 <= arrived / wanted <= 1.05
    assert by_nearest / wanted < 0.5


def test_a_step_has_the_same_bytes_after_it_is_opened_again(
    build_model: Build, make_sequences: Make, tmp_path: Path
) -> None:
    model_dir = build_model(tmp_path / "model", True, torch.bfloat16)
    rank = trained(model_dir, make_sequences, "bfloat16")
    rank.save("run", str(tmp_path / "saved"))
    rank.export_merged("run", str(tmp_path / "first"), "bfloat16")
    adapted = (tmp_path / "first" / export.ADAPTED_FILE).read_bytes()
    again = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "bfloat16", 1, "cpu", 64)
    again.open_run("run", LoraSettings(rank=4, alpha=12), str(tmp_path / "saved"))
    for name in ("second", "third"):
        again.export_merged("run", str(tmp_path / name), "bfloat16")
        assert (tmp_path / name / export.ADAPTED_FILE).read_bytes() == adapted


def test_without_a_change_the_weights_are_the_base_models(build_model: Build, tmp_path: Path) -> None:
    model_dir = build_model(tmp_path / "model", True, torch.bfloat16)
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "bfloat16", 1, "cpu", 64)
    rank.open_run("run", LoraSettings(rank=4, alpha=12))
    rank.export_merged("run", str(tmp_path / "merged"), "bfloat16")
    base = load_file(model_dir / "model.safetensors")
    for name, tensor in load_file(tmp_path / "merged" / export.ADAPTED_FILE).items():
        assert torch.equal(tensor, base[name]), name


def test_one_tensor_at_a_time_is_in_memory(make_sequences: Make, tmp_path: Path) -> None:
    """Two copies of the largest tensor in float32 at most, of a model that is many times as large."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    rank = trained(tmp_path / "model", make_sequences)
    with LiveBytes() as live:
        live.add(list(rank._policy.parameters()))
        resident = live.restart()
        rank.export_merged("run", str(tmp_path / "merged"), "bfloat16")
    taken, largest = live.peak - resident, 4 * 64 * 128
    assert largest <= taken <= 2 * largest
    assert (tmp_path / "merged" / "model-adapted.safetensors").stat().st_size > 5 * taken
