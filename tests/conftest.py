"""For all tests: say on which kind of CPU they run, since times depend on it."""

from __future__ import annotations

from insitu.backend.plan.compute import this_cpu


def pytest_report_header() -> str:
    return f"CPU: {this_cpu()}"
