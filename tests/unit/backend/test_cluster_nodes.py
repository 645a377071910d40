"""A Ray cluster of several nodes is rejected with the reason."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="the backend's clusters are Ray's")

from insitu.backend.fleet.cluster import check_address, check_nodes
from insitu.errors import CannotHonour


def node(address: str, alive: bool = True) -> dict[str, object]:
    return {"NodeManagerAddress": address, "Alive": alive}


def test_one_node_is_enough() -> None:
    check_address("127.0.0.1:6379")
    check_nodes("auto", [node("10.0.0.1"), node("10.0.0.2", alive=False)])


def test_several_nodes_are_named() -> None:
    with pytest.raises(CannotHonour, match=r"2 nodes \(10.0.0.1, 10.0.0.2\).*loopback") as rejected:
        check_nodes("auto", [node("10.0.0.1"), node("10.0.0.2")])
    assert "leave out --ray-address" in rejected.value.hint


def test_a_client_has_no_node_here() -> None:
    with pytest.raises(CannotHonour, match="ray://head:10001"):
        check_address("ray://head:10001")
