"""Rows branch in a family whose attention is plain and full, unless a branch sees its sibling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from insitu.training.model import attention, self_check
from insitu.training.model.loading import load_policy
from insitu.training.model.policy import attends_fully

CPU = torch.device("cpu")


def test_rows_branch_where_a_branch_gives_what_it_gives_alone(model_dir: Path) -> None:
    policy = load_policy(str(model_dir), CPU)
    assert policy.can_branch
    error, blind = self_check.branch_errors(policy)
    assert error < 1e-5 < 1e-2 < blind


def test_a_model_that_drops_the_mask_computes_rows_apart(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "tree_mask", lambda *_: None)
    policy = load_policy(str(model_dir), CPU)
    assert not policy.can_branch
    assert policy.model.config._attn_implementation == "sdpa"
    assert "if a branch sees the other" in caplog.text


def test_a_model_that_does_not_take_the_mask_computes_rows_apart(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reject(*_: object) -> None:
        raise TypeError("got an unexpected keyword argument 'tree'")

    monkeypatch.setattr(attention, "tree_mask", reject)
    assert not load_policy(str(model_dir), CPU).can_branch
    assert "unexpected keyword argument 'tree'" in caplog.text


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("llama", {}, True),
        ("qwen3_moe", {}, True),
        ("mistral", {"sliding_window": None}, True),
        ("mistral", {"sliding_window": 64, "max_position_embeddings": 512}, False),
        ("mistral", {"sliding_window": 512, "max_position_embeddings": 512}, True),
        ("gemma3_text", {}, False),
        ("qwen3_5_text", {}, False),
        ("deepseek_v3", {}, False),
    ],
)
def test_windows_states_and_latents_keep_rows_apart(
    family: str, settings: dict[str, Any], expected: bool
) -> None:
    assert attends_fully(AutoConfig.for_model(family, **settings)) is expected


def test_rows_stay_apart_on_all_ranks_if_they_do_on_one(model_dir: Path) -> None:
    for dissent in (0, 1):  # before the ranks compute together, and after
        policy = load_policy(str(model_dir), CPU)
        asked: list[bool] = []

        def agree(mine: bool, dissent: int = dissent, asked: list[bool] = asked) -> bool:
            asked.append(mine)
            return mine and len(asked) - 1 != dissent

        assert policy.can_branch
        self_check.settle_branches(policy, agree)
        assert asked == [True] * (dissent + 1)
        assert not policy.can_branch
