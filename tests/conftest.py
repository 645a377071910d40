"""For all tests: say on which kind of CPU they run, since times depend on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from insitu.backend.plan.compute import this_cpu

if TYPE_CHECKING:
    from tests.support.postgres import Cluster

# A busy machine is not a slow function: what takes time is bounded by a test's own limit.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_report_header() -> str:
    return f"CPU: {this_cpu()}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time; nothing runs beside it (tests.support.lanes)")
    config.addinivalue_line("markers", "sweep: not part of `make test`; `make sweeps` runs it")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """The server of this process, started by the first test that needs it."""
    from tests.support.postgres import OFF, Cluster

    if os.environ.get(OFF):
        pytest.skip(f"{OFF} is set")
    cluster = Cluster(durable=False)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def postgres_url(postgres: Cluster) -> Iterator[str]:
    """The URL of a database of this test's own."""
    with postgres.database() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue("postgres_url")
