"""The GPUs of a Ray cluster of two nodes are read from both, with a stand-in for the driver's tool."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from insitu.backend.plan.devices.cluster import read_cluster_gpus
from insitu.errors import CannotHonour

pytestmark = pytest.mark.timeout(180)

LINES = "\\n".join(f"{i}, GPU-{i}, 81559, 1024, 9.0, 580.65.06, NVIDIA H100" for i in range(8))
OLD = "0, GPU-0, 81559, 0, 6.0, 580.65.06, NVIDIA P100"


@pytest.fixture
def said(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", LINES)


@pytest.fixture
def standin_driver(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in for nvidia-smi, and a compiler, first on the path of the nodes."""
    for name, answer in (("nvidia-smi", said), ("gcc", "")):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("standin_driver")
@pytest.mark.parametrize(("head", "worker"), [(0, 4), pytest.param(4, 2, marks=pytest.mark.sweep), (0, 0)])
def test_all_nodes_are_read(head: int, worker: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": head})
    try:
        cluster.add_node(num_cpus=1, num_gpus=worker)
        found = read_cluster_gpus(cluster.address)
        assert not ray.is_initialized(), "the cluster is joined again when everything is planned"
        if not worker:
            assert found is None
            with pytest.raises(CannotHonour, match="no node of --ray-address"):
                read_cluster_gpus(cluster.address, needed=True)
            return
        assert found is not None
        assert found.num_devices == head + worker
        assert sorted(found.nodes) == sorted(count for count in (head, worker) if count)
        assert (found.device_bytes, found.used_bytes) == (81559 * 2**20, 2**30)
        assert found.capability == 9.0
    finally:
        cluster.shutdown()


@pytest.mark.usefixtures("standin_driver")
@pytest.mark.parametrize("said", [OLD], indirect=True)
def test_the_error_of_a_node_is_the_user_s() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    try:
        with pytest.raises(CannotHonour, match=r"^on the node .*: NVIDIA P100 has compute capability 6\.0"):
            read_cluster_gpus(cluster.address)
    finally:
        cluster.shutdown()
