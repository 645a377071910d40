"""One backend with a real model for all tests in which it learns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from insitu.testing.models import smollm2
from insitu.types import RunState
from tests.support.backend import Backend

FIRST = ("test_finetune_learns", "test_exact_tokens")
"""What to run while there is time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A model that learns needs the whole machine."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    for item in items:
        item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def started_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """`insitu serve` with the settings of its CPU."""
    arguments = ["--model", str(smollm2()), "--model-name", "smollm2", "--max-seq-length", "256"]
    backend = Backend(tmp_path_factory.mktemp("backend") / "state", [*arguments, "--max-num-seqs", "128"])
    backend.start()
    try:
        asyncio.run(backend.ready())
        yield backend
    finally:
        backend.end()


@pytest.fixture
async def backend(started_backend: Backend) -> AsyncIterator[Backend]:
    """A backend without an open run, so that each test trains the base model."""
    yield started_backend
    async with started_backend.client() as client:
        for run in await client.list_runs():
            if run.state is not RunState.CLOSED:
                await client.close_run(run.name)
