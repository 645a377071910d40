"""`insitu doctor`: check that this machine computes what insitu expects of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from insitu.cli.options.backend_url import url_option
from insitu.cli.options.state_dir import state_dir_of, state_dir_option

if TYPE_CHECKING:
    from insitu.doctor.finding import Finding


@click.command()
@click.option("--device", is_flag=True, help="Check attention, engine and probe on this machine's device.")
@click.option(
    "--model",
    metavar="DIR_OR_ID",
    help="Compare this machine with a model; with --device, compute with it instead of a tiny random one.",
)
@url_option
@state_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(device: bool, model: str | None, url: str, state_dir: Path | None, as_json: bool) -> None:
    """Check that this machine has what insitu needs: packages, device, memory, disk, ports, key, backend.

    Each check prints a line: what was found, what is required, and after a failure the next command; one
    that does not apply says why. Nothing is started and nothing is written.

    With --device, check instead that the device computes what it should, with a trainer and an engine. If
    rows with branches are computed wrongly, the trainer of this machine computes every sequence in a row of
    its own from then on. Exit codes: 0 nothing failed, 1 a check failed, 2 wrong usage.
    """
    import sys

    def say(finding: Finding) -> None:
        if not as_json:
            click.echo(finding.line())

    if device:
        from insitu.doctor.device import check_device

        findings = check_device(model, say)
    else:
        from insitu.doctor.overview import check_all

        findings = check_all(model, url, state_dir_of(state_dir), say)
    num_failed = sum(finding.state == "failed" for finding in findings)
    click.echo(_json(findings) if as_json else _summary(findings, num_failed))
    sys.exit(1 if num_failed else 0)


def _summary(findings: list[Finding], num_failed: int) -> str:
    if num_failed:
        return f"{num_failed} of {len(findings)} checks failed"
    num_skipped = sum(finding.state == "skipped" for finding in findings)
    return f"no check failed, {num_skipped} skipped" if num_skipped else "no check failed"


def _json(findings: list[Finding]) -> str:
    import json
    from dataclasses import asdict

    ok = all(finding.state != "failed" for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, ensure_ascii=False)
