"""The device check of rows with branches: right attention passes, any wrong mask or kernel fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from insitu.errors import InvalidRequest
from insitu.training.attention_check import AttentionShape, TreeRowError, attention_shape, tree_row_error
from insitu.training.model import attention
from insitu.training.model.branch_verdict import keep_verdict, may_branch
from insitu.types import LoraSettings, StepSettings, TrainingSequence
from tests.support.sequences import train

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_path_of_this_device_passes(dtype: torch.dtype) -> None:
    error = tree_row_error(SHAPE, CPU, dtype)
    assert error.holds, error
    assert error.value > 0, "compared with itself, nothing could fail"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_of_another_branch_in_the_mask_fails(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible = attention.QueryBlock.visible_qk
    altered_pairs: list[torch.Tensor] = []

    def altered(block: attention.QueryBlock) -> torch.Tensor:
        seen = visible(block)
        if block.start > 500 and block.stop < 800:
            query = torch.arange(block.start, block.stop)[:, None]
            hidden = (~seen & (block.place_k < query)).nonzero()
            if len(hidden):
                altered_pairs.append(hidden[-1])
                seen[tuple(hidden[-1])] = True
        return seen

    monkeypatch.setattr(attention.QueryBlock, "visible_qk", altered)
    assert not tree_row_error(SHAPE, CPU, dtype).holds
    assert altered_pairs


def test_a_wrong_gradient_fails_though_the_values_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = attention._flash_backward

    def altered(*args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        of_query, of_keys, of_values = backward(*args, **kwargs)
        return of_query, of_keys * 1.01, of_values

    monkeypatch.setattr(attention, "_flash_backward", altered)
    error = tree_row_error(SHAPE, CPU, torch.float32)
    assert error.value <= error.value_bound
    assert not error.holds


def test_nan_does_not_hold() -> None:
    nan = float("nan")
    assert not TreeRowError(nan, 1.0, 0.0, 1.0).holds
    assert not TreeRowError(0.0, 1.0, nan, 1.0).holds


def test_heads_are_read_from_the_model(model_dir: Path) -> None:
    assert attention_shape(str(model_dir)) == AttentionShape(2, 1, 8)


def test_a_verdict_belongs_to_one_head_size_and_is_replaced(cache: Path) -> None:
    assert may_branch(CPU, 64)
    path = keep_verdict(CPU, 128, holds=False, detail="values 0.5 (bound 0.02)")
    assert path.is_relative_to(cache)
    assert not may_branch(CPU, 128)
    assert may_branch(CPU, 64)
    assert keep_verdict(CPU, 128, holds=True, detail="") == path


def test_a_damaged_verdict_is_an_error_with_the_next_command(cache: Path) -> None:
    path = keep_verdict(CPU, 32, holds=True, detail="")
    path.write_text('{"holds": "perhaps"}')
    with pytest.raises(InvalidRequest, match="insitu doctor --device"):
        may_branch(CPU, 32)


def test_after_a_failed_check_rows_do_not_branch(
    cache: Path,
    model_dir: Path,
    make_sequences: Callable[..., list[TrainingSequence]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from insitu.backend.fleet.trainer_rank import TrainerRank

    def trained() -> tuple[dict[str, float], list[list[float]]]:
        rank = TrainerRank(0, 1, "127.0.0.1", 0, str(model_dir), "float32", 1, "cpu", 256)
        rank.open_run("run", LoraSettings())
        metrics = train(rank, "run", make_sequences(6), StepSettings(learning_rate=1e-2))
        return metrics, rank.score("run", [[1, 2, 3, 4, 5]])

    branching, expected = trained()
    keep_verdict(CPU, 8, holds=False, detail="values 0.5 (bound 0.0001)")
    from insitu.training.model import branch_verdict

    branch_verdict._holds.cache_clear()
    with caplog.at_level(logging.WARNING):
        apart, got = trained()
    assert apart["num_computed_tokens"] > branching["num_computed_tokens"], "prefixes are not shared"
    assert got == [pytest.approx(expected[0], abs=1e-5)]
    assert "rows do not branch on cpu" in caplog.text
    assert "values 0.5 (bound 0.0001)" in caplog.text
