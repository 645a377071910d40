"""Fixtures of all integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateway_process import Running, start_gateway, wait_up
from tests.support.vllm_server import VllmServer, vllm_tiny

__all__ = ["vllm_tiny"]


@pytest.fixture
def process(vllm_tiny: VllmServer, tmp_path: Path) -> Iterator[Running]:
    yield from start_gateway(vllm_tiny, tmp_path)


@pytest.fixture
async def gateway(process: Running) -> Running:
    await wait_up(process)
    await process.put_table()
    return process
