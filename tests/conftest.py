"""For all tests: say on which kind of CPU they run, since times depend on it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from insitu.backend.plan.compute import this_cpu

# A busy machine is not a slow function: what takes time is bounded by a test's own limit.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_report_header() -> str:
    return f"CPU: {this_cpu()}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time; nothing runs beside it (tests.support.lanes)")
    config.addinivalue_line("markers", "sweep: not part of `make test`; `make sweeps` runs it")
