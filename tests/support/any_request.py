"""Requests that an OpenAPI document leads to, valid and not, each of which must be answered without a 5xx."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

IS_LONG = os.environ.get("INSITU_TESTS") == "long"
LIMIT_SECONDS = 3600 if IS_LONG else 300
_EXAMPLES = 400 if IS_LONG else 4
"""Requests for each route and method."""

Seen = Counter[tuple[str, int]]
"""Answers by route and status."""


def ask_each(
    operations: Iterable[Any],
    headers: dict[str, str],
    prepare: Callable[[Any], Any] = lambda case: case,
    rightly: frozenset[tuple[str, int]] = frozenset(),
) -> Seen:
    """Send requests to every operation; `prepare` completes those that the document says are valid.

    `rightly` has paths with an answer of 5xx that is right where nothing is served.
    """
    seen: Seen = Counter()
    for operation in operations:
        valid = operation.as_strategy().map(prepare)
        odd = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

        @given(case=valid | odd)
        @settings(
            max_examples=_EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list[Any](HealthCheck),
        )
        def ask(case: Any) -> None:
            answer = case.call(headers=headers)
            seen[f"{case.method} {case.path}", answer.status_code] += 1
            right = answer.status_code < 500 or (case.path, answer.status_code) in rightly
            assert right, f"{case.as_curl_command()}: {answer.text[:300]}"

        ask()
    print(f"\n{seen.total()} requests, answers by status: {_by_status(seen)}")
    return seen


def _by_status(seen: Seen) -> dict[int, int]:
    return dict(sorted(Counter(status for _, status in seen.elements()).items()))
