"""Whatever is sent, the server never fails: answers are below 500 and errors have the one shape."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.odd_bodies import CALL, JSON, RUN, SCALARS, STEP, TRAJECTORY, mutate

from .conftest import put

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(answer) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"type", "message", "hint"}


@FUZZ
@given(body=mutate(RUN) | JSON)
async def test_registrations(http, body):
    check(await http.post("/v1/runs", json=body))


@FUZZ
@given(body=mutate(STEP) | JSON, key=st.text(st.characters(codec="latin-1"), max_size=10))
async def test_steps(http, body, key):
    headers = {"Idempotency-Key": key.encode("latin-1")}
    check(await http.post("/v1/runs/run/steps", json=body, headers=headers))


@FUZZ
@given(trajectory=mutate(TRAJECTORY), call=mutate(CALL), tail=st.binary(max_size=20))
async def test_uploads(http, trajectory, call, tail):
    lines = [{"group": {"num_trajectories": 1}}, {"trajectory": trajectory}, {"call": call}]
    check(await put(http, "g", b"\n".join(orjson.dumps(line) for line in lines) + b"\n" + tail))


@FUZZ
@given(body=st.binary(max_size=200))
async def test_bytes(http, body):
    check(await put(http, "g", body))
    check(await http.post("/v1/runs", content=body, headers={"Content-Type": "application/json"}))


@FUZZ
@given(part=st.text(max_size=20))
async def test_paths(http, part):
    from urllib.parse import quote

    for template in ("/v1/runs/{}", "/v1/runs/{}/steps", "/v1/jobs/{}", "/v1/runs/run/groups/{}", "/{}"):
        try:
            path = template.format(quote(part, safe=""))
        except UnicodeEncodeError:
            pytest.skip("a lone surrogate cannot be sent")
        check(await http.get(path))


@FUZZ
@given(after=SCALARS, limit=SCALARS)
async def test_queries(http, after, limit):
    check(await http.get("/v1/runs/run/steps", params={"after": str(after), "limit": str(limit)}))
