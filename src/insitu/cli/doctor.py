"""`insitu doctor`: check that this machine computes what insitu expects of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from insitu.doctor.finding import Finding


@click.command()
@click.option("--device", is_flag=True, help="Check attention, engine and probe on this machine's device.")
@click.option(
    "--model",
    metavar="DIR_OR_ID",
    help="Model for the checks: a directory or a hub id. Default: a tiny random model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(device: bool, model: str | None, as_json: bool) -> None:
    """Check that this machine computes what insitu expects of it.

    Each check prints a line with its figures and bounds. A failed one names the next command; one that this
    machine cannot run says why. With --device, if rows with branches are computed wrongly, the trainer of
    this machine computes every sequence in a row of its own from then on. Exit codes: 0 nothing failed, 1 a
    check failed, 2 wrong usage.
    """
    import sys

    if not device:
        raise click.UsageError("nothing to check was named. Try: insitu doctor --device")
    from insitu.doctor.device import check_device

    findings = check_device(model, lambda finding: None if as_json else click.echo(finding.line()))
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
