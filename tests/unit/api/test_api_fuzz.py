"""Whatever is sent, the server never fails: answers are below 500 and errors have the one shape."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import inline_call, put

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["run", "g", "", "../x", "\x00", "__proto__", "a" * 65])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def mutate(valid: dict):
    """A valid object with some fields replaced, dropped or added."""
    fields = st.sampled_from([*valid, "surprise"])
    return st.dictionaries(fields, JSON, max_size=3).flatmap(
        lambda changes: st.sets(st.sampled_from(list(valid)), max_size=2).map(
            lambda dropped: {k: v for k, v in {**valid, **changes}.items() if k not in dropped}
        )
    )


def check(answer) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"type", "message", "hint"}


RUN = {"name": "fuzz", "base_model": "m", "project": "p", "lora": {"rank": 4}, "engine_args": {"a": 1}}
STEP = {"groups": ["g"], "settings": {"learning_rate": 1e-3}}
TRAJECTORY = {"rollout_id": "r", "reward": 1.0, "ending": "completed", "num_inline_calls": 1, "metadata": {}}
CALL = inline_call()["call"]


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
