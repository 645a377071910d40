"""A Ray cluster of several nodes is rejected where settings need one node, with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the backend's clusters are Ray's")

from insitu.backend.fleet import cluster
from insitu.backend.fleet.cluster import check_nodes, num_nodes
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.devices.cluster import check_address
from insitu.backend.plan.settings import ServeSettings
from insitu.errors import CannotHonour

NODES = [
    {"NodeManagerAddress": "10.0.0.1", "Alive": True},
    {"NodeManagerAddress": "10.0.0.2", "Alive": True},
]


@pytest.fixture
def settings(tmp_path: Path) -> ServeSettings:
    compute = Compute("float32", (), 1, None, "")
    return ServeSettings(tmp_path, "cpu", compute, "adapter", "dedicated", "default", ray_address="head:6379")


@pytest.fixture(autouse=True)
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "asks_for_token", lambda: True)


def test_a_node_that_is_away_counts_and_one_that_came_back_counts_once() -> None:
    assert num_nodes([NODES[0], {**NODES[1], "Alive": False}]) == 2
    assert num_nodes([*NODES, {**NODES[1], "Alive": False}]) == 2


def test_one_node_needs_nothing(settings: ServeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "asks_for_token", lambda: False)
    check_nodes(replace(settings, publication="merged", placement="shared"), NODES[:1])


def test_several_nodes_take_adapters_on_dedicated_devices(settings: ServeSettings) -> None:
    check_nodes(settings, NODES)


@pytest.mark.parametrize(
    ("given", "cause", "hint"),
    [
        ({"publication": "merged"}, "merged weights", "--publication adapter"),
        ({"placement": "shared"}, "share devices", "--placement dedicated"),
    ],
)
def test_what_needs_one_node(settings: ServeSettings, given: dict, cause: str, hint: str) -> None:
    with pytest.raises(CannotHonour, match=f"--ray-address head:6379: .* 2 nodes.*{cause}") as rejected:
        check_nodes(replace(settings, **given), NODES)
    assert hint in rejected.value.hint


def test_several_nodes_are_joined_behind_a_token(
    settings: ServeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "asks_for_token", lambda: False)
    with pytest.raises(CannotHonour, match="no token") as rejected:
        check_nodes(settings, NODES)
    assert "RAY_AUTH_MODE=token" in rejected.value.hint


def test_a_client_has_no_node_here() -> None:
    with pytest.raises(CannotHonour, match="ray://head:10001"):
        check_address("ray://head:10001")
