"""`insitu doctor`: what this machine has for insitu, what is required, and how to get it. Starts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from insitu.doctor.backend import check_backend
from insitu.doctor.finding import Finding
from insitu.doctor.machine import check_machine

Say = Callable[[Finding], None]


def check_all(model: str | None, url: str, state_dir: Path, say: Say) -> list[Finding]:
    """Run all checks, handing each finding to `say` as soon as it is known."""
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        say(finding)

    async def ask() -> None:
        async for finding in check_backend(url):
            report(finding)

    for finding in check_machine(model, state_dir):
        report(finding)
    asyncio.run(ask())
    return findings
