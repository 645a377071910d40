"""Reward for the right number."""

from __future__ import annotations

import re
from decimal import Decimal

from pydantic import Field

from insitu.datasets.values import to_text
from insitu.errors import InvalidRequest
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.exact_match import expected_text
from insitu.rewards.items import EvalItem, EvalResult

NUMBER = re.compile(
    r"""
    (?: (?<![\w).]) [-+] )?                        # a sign, unless it is an operator: 3-4, (a)-4
    (?: (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9])  # 1,234,567
          | [0-9]+ ) (?: \.[0-9]+ )?
      | \.[0-9]+ )
    (?: [eE] [-+]? [0-9]+ )?
    """,
    re.VERBOSE,
)


class NumericConfig(ComponentConfig):
    """Allowed deviation: the larger of the two tolerances."""

    tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """As a number."""
    relative_tolerance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """As a fraction of the expected number."""


@register(Kind.EVALUATOR, "numeric", NumericConfig)
class Numeric(Evaluator):
    """1 if the last number in the output is the (last) number in the expected answer, else 0."""

    def __init__(self, config: NumericConfig, parts: Parts) -> None:  # noqa: ARG002 - every component's shape
        self._config = config

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Score the item; an expected answer without a number is an error."""
        text = expected_text(item)
        expected = last_number(text)
        if expected is None or not expected.is_finite():
            raise InvalidRequest(
                f"example `{item.id}` expects {text[:100]!r}, which contains no number",
                hint="give numbers in the column of structure.answer_key, or use exact_match",
            )
        found = last_number(to_text(item.output))
        if found is None:
            return EvalResult(item.id, 0.0, {"found": None, "expected": str(expected)})
        return EvalResult(
            item.id, float(self._close(found, expected)), {"found": str(found), "expected": str(expected)}
        )

    def _close(self, found: Decimal, expected: Decimal) -> bool:
        if found == expected:
            return True
        # In decimals: 0.3 is within 0.1 of 0.2, which floats deny.
        share = Decimal(repr(self._config.relative_tolerance)) * abs(expected)
        allowed = max(Decimal(repr(self._config.tolerance)), share)
        return allowed > 0 and abs(found - expected) <= allowed


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text; commas may separate thousands. An absurd exponent gives Infinity."""
    found = None
    for match in NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")):
        found = match.group()
    if found is None:
        return None
    exponent = found.lower().partition("e")[2].lstrip("+-")
    # Beyond what decimals compute with, and beyond what anybody asks for.
    return Decimal("Infinity") if len(exponent) > 4 else Decimal(found.replace(",", ""))
