"""docs/api.md against a running API: its examples run, and it names the routes that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI

from insitu import errors
from insitu.backend.api.settings import Limits

from .test_api_door import ROUTES
from .test_api_process import KEY, free_port, processes, ready, start

__all__ = ["processes"]

PAGE = Path(__file__).parents[3] / "docs" / "api.md"


def test_every_route_is_described(app: FastAPI):
    text = (
        PAGE.read_text()
        .replace("{id}", "{}")
        .replace("{name}", "{}")
        .replace("{step}", "{}")
        .replace("{sha256}", "{}")
        .replace("{file}", "{}")
    )
    for path, methods in ROUTES.items():
        for method in methods - {"HEAD"}:
            assert f"`{method} {re.sub('{[^}]+}', '{}', path)}" in text, (method, path)


def test_every_described_error_exists_with_its_status():
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for status, name in rows:
        if name != "MethodNotAllowed":
            assert getattr(errors, name).status == int(status)


def test_the_limits_are_the_stated_ones():
    limits = Limits()
    assert (limits.max_line_bytes, limits.max_group_bytes) == (16 * 2**20, 2**30)
    assert (limits.max_trajectories, limits.max_calls_per_trajectory) == (4096, 10_000)
    assert limits.max_adapter_bytes == 4 * 2**30


async def test_the_examples_run(tmp_path: Path, processes: list[subprocess.Popen[bytes]]):
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    if not blocks:
        pytest.fail("docs/api.md has no examples")
    port = free_port()
    processes.append(start(tmp_path / "state", port))
    await (await ready(port)).close()
    script = "set -euo pipefail\n" + "\n".join(blocks)
    environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), "INSITU_API_KEY": KEY}
    done = subprocess.run(
        ["bash", "-c", script],
        env=environment | {"URL": f"http://127.0.0.1:{port}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in ('"state":"registered"', '"created":true', '"state":"queued"', "event: end", '"closed"'):
        assert expected in done.stdout + done.stderr
