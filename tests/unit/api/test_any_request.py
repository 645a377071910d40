"""No request that the API's own description leads to, valid or not, is answered with a 5xx."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings

from tests.unit.api.conftest import KEY

pytestmark = pytest.mark.timeout(300)
EXAMPLES = 400 if os.environ.get("INSITU_TESTS") == "long" else 4
"""Requests for each route and method."""


@schemathesis.serializer("application/vnd.insitu.adapter", "application/x-ndjson")
def as_bytes(_context: Any, value: Any) -> bytes:
    """Send what is no JSON document as the bytes that were drawn, and anything else as a line of JSON."""
    return value if isinstance(value, bytes) else json.dumps(value, default=str).encode() + b"\n"


def operations(app: FastAPI) -> list[Any]:
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", app, headers=headers())
    return [found.ok() for found in schema.get_all_operations()]


def headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}", "Host": "127.0.0.1:7623"}


def test_no_request_is_answered_with_a_server_error(app: FastAPI) -> None:
    seen: Counter[tuple[str, int]] = Counter()
    for operation in operations(app):
        if operation.path == "/ready":  # says 503 here, and rightly: nothing is served
            continue
        valid = operation.as_strategy()
        odd = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

        @given(case=valid | odd)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            answer = case.call(headers=headers())
            seen[f"{case.method} {case.path}", answer.status_code] += 1
            assert answer.status_code < 500, f"{case.as_curl_command()}: {answer.text[:300]}"

        ask()
    assert len({where for where, _ in seen}) >= 15
    assert {200, 400, 404} <= {status for _, status in seen}, "good and odd requests were among them"
