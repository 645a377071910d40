"""The Ray cluster of a backend: reachable from this machine only, and only with the backend's token."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from insitu.backend.fleet.cluster import start_ray, stop_ray
from insitu.backend.fleet.ray_door import TOKEN_FILE
from tests.support.listeners import beyond_loopback, listening_addresses

pytestmark = pytest.mark.timeout(120)

READ_NODES = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("closed")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    start_ray(None, folder, folder)
    try:
        yield folder
    finally:
        stop_ray()


def test_every_port_is_on_loopback(folder: Path) -> None:
    actor = ray.remote(Idle).remote()
    ray.get(actor.ready.remote(), timeout=60)
    assert len(listening_addresses(os.getpid())) >= 4, "control store, raylet, driver and actor listen"
    assert beyond_loopback(os.getpid()) == {}


def test_the_token_is_this_users_alone(folder: Path) -> None:
    token = folder / TOKEN_FILE
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64


def test_a_client_without_the_token_is_refused(folder: Path, tmp_path: Path) -> None:
    assert read_nodes(tmp_path, token=folder / TOKEN_FILE) == "1"
    other = tmp_path / "other.token"
    other.write_text("0" * 64)
    for token in (None, other):
        with pytest.raises(subprocess.CalledProcessError) as refused:
            read_nodes(tmp_path, token=token)
        assert "nauthenticated" in refused.value.stderr or "uthentication" in refused.value.stderr


class Idle:
    def ready(self) -> bool:
        return True


def read_nodes(home: Path, token: Path | None) -> str:
    """Ask the control store for its nodes, as a process of another user would."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(home)
    if token is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    command = [sys.executable, "-c", READ_NODES, ray.get_runtime_context().gcs_address]
    answered = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return answered.stdout.strip()
