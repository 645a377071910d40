"""For all tests: say on which kind of CPU they run, since times depend on it."""

from __future__ import annotations

from insitu.backend.fleet.compute import cpu_kind
from insitu.backend.fleet.cpu import read_cpu


def pytest_report_header() -> str:
    return f"CPU: {cpu_kind(read_cpu())}"
