"""One line per gate: what was measured, the bound, and whether it holds."""

from __future__ import annotations


def gate(name: str, measured: float, bound: float, unit: str) -> None:
    """Print the gate's line; fail if the measured value exceeds the bound."""
    holds = measured <= bound
    print(f"gate {name}: {measured:.3g} {unit} (bound {bound:g}) {'ok' if holds else 'EXCEEDED'}")
    assert holds, f"{name}: {measured:.4g} {unit} exceeds {bound:g}"
