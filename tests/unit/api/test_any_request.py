"""No request that the API's own description leads to, valid or not, is answered with a 5xx."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI

from tests.support.any_request import LIMIT_SECONDS, ask_each
from tests.unit.api.conftest import KEY

pytestmark = pytest.mark.timeout(LIMIT_SECONDS)
HEADERS = {"Authorization": f"Bearer {KEY}", "Host": "127.0.0.1:7623"}


@schemathesis.serializer("application/vnd.insitu.adapter", "application/x-ndjson")
def as_bytes(_context: Any, value: Any) -> bytes:
    """Send what is no JSON document as the bytes that were drawn, and anything else as a line of JSON."""
    return value if isinstance(value, bytes) else json.dumps(value, default=str).encode() + b"\n"


def operations(app: FastAPI) -> list[Any]:
    schema: Any = schemathesis.openapi.from_asgi("/v1/openapi.json", app, headers=HEADERS)
    found: list[Any] = [operation.ok() for operation in schema.get_all_operations()]
    # /ready says 503 here, and rightly: nothing is served.
    return [operation for operation in found if operation.path != "/ready"]


def test_no_request_is_answered_with_a_server_error(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    # It waits until the run is served, which nothing here does.
    monkeypatch.setattr("insitu.backend.art.routes._READY_SECONDS", 0.2)
    seen = ask_each(operations(app), HEADERS, rightly=frozenset({("/_prepare_backend_for_training", 504)}))
    assert len({where for where, _ in seen}) >= 15
    assert {200, 400, 404} <= {status for _, status in seen}, "good and odd requests were among them"
