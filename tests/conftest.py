"""For all tests: say on which kind of CPU they run, since times depend on it."""

from __future__ import annotations

import pytest

from insitu.backend.plan.compute import this_cpu


def pytest_report_header() -> str:
    return f"CPU: {this_cpu()}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time; nothing runs beside it (tests.support.lanes)")
    config.addinivalue_line("markers", "sweep: not part of `make test`; `make sweeps` runs it")
