"""Durations on the command line: 12h, 30d, 8w."""

from __future__ import annotations

import re

import click

_SECONDS = {"h": 3600, "d": 86_400, "w": 7 * 86_400}


def seconds_of(text: str, option: str, units: str = "hdw") -> float:
    """Return the seconds of a duration in one of the units, at most 9999 of it."""
    match = re.fullmatch(rf"([1-9][0-9]{{0,3}})([{units}])", text)
    if match is None:
        examples = [example for example in ("12h", "30d", "8w") if example[-1] in units]
        such = f"{', '.join(examples[:-1])} or {examples[-1]}"
        raise click.BadParameter(f"{text!r} is not a time such as {such}, at most 9999", param_hint=option)
    return float(int(match[1]) * _SECONDS[match[2]])
