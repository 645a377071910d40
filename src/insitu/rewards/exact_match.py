"""Reward for the expected answer, word for word."""

from __future__ import annotations

from insitu.datasets.values import to_text
from insitu.errors import InvalidRequest
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem, EvalResult


class ExactMatchConfig(ComponentConfig):
    """Options for comparing output and expected answer."""

    ignore_case: bool = False
    """Take upper and lower case as equal."""
    strip: bool = True
    """Ignore white space at both ends."""


@register(Kind.EVALUATOR, "exact_match", ExactMatchConfig)
class ExactMatch(Evaluator):
    """1 if the output is the expected answer, else 0. Anything but text is compared as JSON."""

    def __init__(self, config: ExactMatchConfig, parts: Parts) -> None:  # noqa: ARG002 - every component's shape
        self._config = config

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Score the item; an example without an expected answer is an error."""
        expected = expected_text(item)
        score = float(self._normal(to_text(item.output)) == self._normal(expected))
        return EvalResult(item.id, score, {"expected": expected})

    def _normal(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.ignore_case else text


def expected_text(item: EvalItem) -> str:
    """Return the expected answer as text."""
    if item.expected is None:
        raise InvalidRequest(
            f"example `{item.id}` has no expected answer", hint="choose its column with structure.answer_key"
        )
    return to_text(item.expected)
