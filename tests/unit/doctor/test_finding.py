"""Findings: states from figures and bounds, one line each."""

from __future__ import annotations

from insitu.doctor.finding import NO_CUDA, Figure, Finding, failed, measured, skipped
from insitu.errors import ChildFailed
from insitu.wire.message import encode, read


def test_a_figure_over_its_bound_fails_with_the_next_command() -> None:
    figures = [Figure("values", 0.5, 0.02), Figure("gradients", 0.01, 0.1), Figure("max", 9.0)]
    finding = measured("flex attention", figures, hint="report it")
    assert finding.state == "failed"
    assert finding.line().startswith("failed  flex attention  ")
    assert finding.line().endswith(
        "values 0.5 (bound 0.02), gradients 0.01 (bound 0.1), max 9; next: report it"
    )


def test_figures_within_their_bounds_pass_without_a_hint() -> None:
    finding = measured("probe noise", [Figure("mean", 0.02, 0.02), Figure("max", 9.0)], hint="report it")
    assert finding == Finding("probe noise", "ok", [Figure("mean", 0.02, 0.02), Figure("max", 9.0)])
    assert "next" not in finding.line()


def test_a_figure_that_is_not_finite_fails() -> None:
    finding = measured("flex attention", [Figure("values", None, 0.02)], hint="report it")
    assert finding.state == "failed"
    assert "values not finite (bound 0.02)" in finding.line()


def test_an_error_becomes_one_line_and_its_own_hint_comes_first() -> None:
    error = ChildFailed("vLLM ended:\nTraceback\n  …", hint="free the device")
    assert failed("engine start", error, hint="see the log") == Finding(
        "engine start", "failed", detail="vLLM ended: Traceback …", hint="free the device"
    )
    assert failed("engine start", ChildFailed("x"), hint="see the log").hint == "see the log"


def test_a_skipped_check_says_why() -> None:
    assert skipped("sleep and wake", NO_CUDA).line().split() == [
        *("skipped", "sleep", "and", "wake", "no", "CUDA", "device")
    ]


def test_findings_cross_a_process_boundary() -> None:
    finding = Finding("adapter", "failed", [Figure("engine − trainer", 0.5, 0.25, "nat")], "a", "b")
    assert read(Finding, encode(finding)) == finding
