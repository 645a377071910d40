"""Stochastic rounding: no bias, only the two neighbours, the same bytes for the same seed."""

from __future__ import annotations

import pytest
import torch

from insitu.training.model.rounding import round_stochastically, seed_of

HALVES = (torch.bfloat16, torch.float16)
NUM_DRAWS = 200_000


def every_finite_value(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    return values[values.isfinite()]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [0.1, -0.1, 1.0009, -3.7e-3, 2.3e-6, -4.1e-8, 1023.7])
def test_the_mean_is_the_value_and_only_its_neighbours_occur(dtype: torch.dtype, value: float) -> None:
    exact = torch.tensor(value)
    rounded = round_stochastically(exact.repeat(NUM_DRAWS), dtype, 7).double()
    values = every_finite_value(dtype).double()
    below, above = values[values <= exact].max(), values[values >= exact].min()
    assert set(rounded.unique().tolist()) <= {below.item(), above.item()}
    share = ((exact - below) / (above - below)).item()
    deviation = ((above - below) * (share * (1 - share) / NUM_DRAWS) ** 0.5).item()
    assert abs(rounded.mean().item() - exact.item()) <= 4 * deviation


@pytest.mark.parametrize("dtype", HALVES)
def test_a_value_that_needs_no_rounding_never_moves(dtype: torch.dtype) -> None:
    values = every_finite_value(dtype)
    for seed in range(5):
        assert torch.equal(round_stochastically(values.clone(), dtype, seed).float(), values)


def test_float32_is_left_as_it_is() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_stochastically(values.clone(), torch.float32, 1), values)


def test_run_step_and_tensor_decide_the_rounding() -> None:
    values = torch.randn(600, 500, generator=torch.Generator().manual_seed(0))

    def rounded(run: str, step: int, tensor: str) -> torch.Tensor:
        return round_stochastically(values.clone(), torch.bfloat16, seed_of(run, step, tensor))

    mine = rounded("run", 12, "q_proj")
    assert mine.shape == values.shape
    assert torch.equal(mine, rounded("run", 12, "q_proj"))
    for other in [
        ("run2", 12, "q_proj"),
        ("run", 13, "q_proj"),
        ("run", 12, "k_proj"),
        ("run1", 2, "q_proj"),
    ]:
        assert not torch.equal(mine, rounded(*other)), other


def test_every_value_has_a_random_number_of_its_own() -> None:
    """Also across the chunks in which they are drawn."""
    rounded = round_stochastically(torch.full((1 << 19,), 1 + 2**-8), torch.bfloat16, 3)
    ups = rounded > 1
    for distance in (1, 2, 4, 1 << 18):
        together = (ups[distance:] & ups[:-distance]).double().mean().item()
        assert together == pytest.approx(0.25, abs=0.005), distance
