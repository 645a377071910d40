"""A base model runs no code of its own, and an adapter's tensors are checked before any is copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from insitu.errors import CorruptCheckpoint
from insitu.training.model.loading import load_policy
from insitu.training.model.lora import check_tensors


def test_no_code_of_a_model_is_run(tmp_path: Path) -> None:
    config = {"model_type": "unheard-of", "auto_map": {"AutoConfig": "code_of_the_model.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code_of_the_model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_policy(str(tmp_path), torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_rejected(odd: float) -> None:
    weights = {"a": torch.tensor([[1.0, odd]])}
    with pytest.raises(CorruptCheckpoint, match="a contains NaN or infinite values"):
        check_tensors(weights, {"a": torch.Size([1, 2])}, "adapter.safetensors")


def test_other_tensors_and_shapes_are_rejected() -> None:
    weights = {"a": torch.zeros(1, 2)}
    check_tensors(weights, {"a": torch.Size([1, 2])}, "adapter.safetensors")
    with pytest.raises(CorruptCheckpoint, match="a has shape"):
        check_tensors(weights, {"a": torch.Size([2, 1])}, "adapter.safetensors")
    with pytest.raises(CorruptCheckpoint, match="has other tensors"):
        check_tensors(weights, {"b": torch.Size([1, 2])}, "adapter.safetensors")
