"""A step's micro-batches go through Ray's object store, or are refused before any is sent."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="the object store is Ray's")

import ray

from insitu.backend.fleet import trainer
from insitu.errors import CannotHonour
from insitu.training.packing import Packing, pack
from tests.support.trees import random_shares


def column_bytes(packing: Packing) -> int:
    every = [packing.rank_batch(rank).columns for rank in range(len(packing.ranks))]
    arrays = [getattr(columns, field.name) for columns in every for field in fields(columns)]
    return sum(array.nbytes for array in arrays if array is not None)


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_bytes_are_counted_before_they_are_copied(
    seed: int, num_groups: int, world_size: int, can_branch: bool
) -> None:
    packing = pack(random_shares(seed, num_groups), 200, world_size, can_branch)
    assert packing.num_bytes == column_bytes(packing)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_larger_than_the_object_store_is_refused_whole(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    packing = pack(random_shares(0, 4), 200, 2)
    sizes = {"here": packing.num_bytes - missing, "elsewhere": 8 * packing.num_bytes}
    nodes = [{"NodeID": name, "Resources": {"object_store_memory": size}} for name, size in sizes.items()]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray, "put", sent.append)
    if not missing:
        trainer._sent(packing)
        assert len(sent) == 2
        return
    with pytest.raises(CannotHonour, match=r"a step of \d+ sequences takes .* MiB; Ray's object store holds"):
        trainer._sent(packing)
    assert not sent
