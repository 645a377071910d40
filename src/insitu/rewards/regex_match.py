"""Reward for an output in which a pattern is found."""

from __future__ import annotations

from typing import Literal, Self

import regex
from pydantic import Field, model_validator

from insitu.datasets.values import to_text
from insitu.errors import DeadlineExceeded
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.exact_match import expected_text
from insitu.rewards.items import EvalItem, EvalResult
from insitu.system.threads import DaemonThreads


class RegexMatchConfig(ComponentConfig):
    """The pattern, in the syntax of the `regex` package."""

    pattern: str
    """Searched for in the output."""
    group: int | str | None = None
    """The capturing group that counts; None is the whole match."""
    compare: Literal["found", "equals_expected"] = "found"
    """`found`: a match is enough; `equals_expected`: the match must be the expected answer."""
    timeout_seconds: float = Field(default=1.0, gt=0, le=60)
    """An output on which the pattern backtracks for longer is an error."""

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        try:
            compiled = regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"pattern {self.pattern!r}: {error}") from error
        if isinstance(self.group, str) and self.group not in compiled.groupindex:
            raise ValueError(f"pattern {self.pattern!r} has no group called {self.group!r}")
        if isinstance(self.group, int) and not 0 <= self.group <= compiled.groups:
            raise ValueError(
                f"pattern {self.pattern!r} has {compiled.groups} groups, not a group {self.group}"
            )
        return self


@register(Kind.EVALUATOR, "regex_match", RegexMatchConfig)
class RegexMatch(Evaluator):
    """1 if the pattern is found (or its first match is the expected answer), else 0."""

    def __init__(self, config: RegexMatchConfig, parts: Parts) -> None:  # noqa: ARG002 - every component's shape
        self._config = config
        self._pattern = regex.compile(config.pattern)
        self._threads = DaemonThreads("insitu-regex")

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Score the item; a search that takes too long is an error."""
        expected = expected_text(item).strip() if self._config.compare == "equals_expected" else None
        found = await self._threads.run(self._search, to_text(item.output))
        if found is None:
            return EvalResult(item.id, 0.0, {"found": None})
        score = 1.0 if expected is None else float(found.strip() == expected)
        return EvalResult(item.id, score, {"found": found[:500], "expected": expected})

    def _search(self, text: str) -> str | None:
        limit = self._config.timeout_seconds
        try:
            # concurrent: the search releases the GIL, so that the event loop keeps running.
            match = self._pattern.search(text, timeout=limit, concurrent=True)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"pattern {self._config.pattern!r} searched {len(text)} characters for longer than "
                f"{limit:g} s",
                hint="write a pattern without nested repetition, or raise timeout_seconds",
            ) from error
        return None if match is None else match.group(self._config.group or 0)
