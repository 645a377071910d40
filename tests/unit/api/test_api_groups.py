from __future__ import annotations

import asyncio
import hashlib
from dataclasses import asdict

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from insitu.backend.api.settings import Limits
from insitu.backend.api.upload import read_lines
from insitu.backend.ledger import Ledger
from insitu.errors import TooLarge
from insitu.types import Ending, GroupState, Trajectory

from .conftest import inline_call, inline_group, ndjson, put


def reference_group(*calls: str, rollout: str = "r", **changes) -> bytes:
    head = {"rollout_id": rollout, "reward": 1.0, "call_ids": list(calls)} | changes
    return ndjson({"group": {"num_trajectories": 1}}, {"trajectory": head})


async def test_a_group_by_reference(http, ledger: Ledger, records, make_call):
    records.append([make_call("c1", rollout_id="r"), make_call("c2", rollout_id="r")])
    body = reference_group("c1", "c2", ending="length", metadata={"task": 7})
    answer = await put(http, "g", body)
    assert answer.status_code == 201
    assert answer.json() == {
        "id": "g", "run": "run", "state": "received", "created": True, "num_trajectories": 1,
    }  # fmt: skip
    stored = ledger.group_record("run", "g").group
    assert stored.trajectories == [Trajectory("r", ["c1", "c2"], 1.0, Ending.LENGTH, {"task": 7})]
    shown = (await http.get("/v1/runs/run/groups/g")).json()
    assert shown["trajectories"][0]["call_ids"] == ["c1", "c2"]


async def test_step_rewards_are_kept_with_the_group(http, ledger: Ledger, records, make_call):
    records.append([make_call("c1", rollout_id="r"), make_call("c2", rollout_id="r")])
    body = reference_group("c1", "c2", step_rewards=[0, -0.5])
    assert (await put(http, "g", body)).status_code == 201
    (stored,) = ledger.group_record("run", "g").group.trajectories
    assert stored == Trajectory("r", ["c1", "c2"], 1.0, step_rewards=[0.0, -0.5])
    shown = (await http.get("/v1/runs/run/groups/g")).json()
    assert shown["trajectories"][0]["step_rewards"] == [0.0, -0.5]
    other = reference_group("c1", "c2", step_rewards=[0, 0.5])
    assert (await put(http, "g", other)).status_code == 409, "another reward is another body"


async def test_a_body_without_step_rewards_hashes_as_before_there_were_any(
    http, ledger: Ledger, records, make_call
):
    records.append([make_call("c1", rollout_id="r")])
    assert (await put(http, "g", reference_group("c1"))).status_code == 201
    head = {"call_ids": ["c1"], "ending": "completed", "metadata": {}, "num_inline_calls": 0}
    hashed = b"1;" + orjson.dumps(head | {"reward": 1.0, "rollout_id": "r"}, option=orjson.OPT_SORT_KEYS)
    assert ledger.group_record("run", "g").body_hash == hashlib.sha256(hashed).hexdigest()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("[1.0]", "1 step_rewards for 2 calls"),
        ("[]", "0 step_rewards for 2 calls"),
        ("[1.0, 1e999]", "line 2"),
        ("[1.0, NaN]", "not JSON"),
        ('[1.0, "1"]', "valid number"),
        ("[1.0, null]", "valid number"),
        ('{"c1": 1.0}', "list"),
    ],
)
async def test_step_rewards_that_cannot_be_used_are_refused(http, records, make_call, given, complaint):
    records.append([make_call("c1", rollout_id="r"), make_call("c2", rollout_id="r")])
    body = reference_group("c1", "c2", step_rewards="?").replace(b'"?"', given.encode())
    answer = await put(http, "g", body)
    assert answer.status_code == 400
    assert complaint in answer.json()["error"]["message"]


async def test_inline_calls_are_recorded_before_the_answer(http, ledger: Ledger, records, make_call):
    full = asdict(make_call("theirs", rollout_id="a", messages=[{"role": "user"}], tools=[], answer={"x": 1}))
    body = ndjson(
        {"group": {"num_trajectories": 2}},
        {"trajectory": {"rollout_id": "a", "reward": 1, "num_inline_calls": 2}},
        inline_call(),
        {"call": full},
        {"trajectory": {"rollout_id": "b", "reward": 0, "num_inline_calls": 1}},
        inline_call(output_ids=[9], logprobs=[-1e-3]),
    )
    assert (await put(http, "g", body)).status_code == 201
    first, second = ledger.group_record("run", "g").group.trajectories
    calls = records.get(first.call_ids + second.call_ids)
    assert [call.rollout_id for call in calls] == ["a", "a", "b"]
    assert {call.source for call in calls} == {"inline"}
    assert {call.run for call in calls} == {"run"}
    assert [call.output_ids for call in calls] == [[4, 5], [4, 5], [9]]
    assert calls[1].messages == [{"role": "user"}]
    assert calls[2].logprobs == pytest.approx([-1e-3])


async def test_the_same_body_is_no_news_however_it_is_spelled(http):
    assert (await put(http, "g", inline_group())).status_code == 201
    again = await put(http, "g", inline_group())
    assert (again.status_code, again.json()["created"]) == (200, False)
    spelled = b"\n".join(
        orjson.dumps(orjson.loads(line), option=orjson.OPT_SORT_KEYS) + b"  \r"
        for line in inline_group().splitlines()
    )
    assert (await put(http, "g", spelled)).status_code == 200
    changed = inline_group().replace(b"-0.5", b"-0.25", 1)
    answer = await put(http, "g", changed)
    assert (answer.status_code, answer.json()["error"]["type"]) == (409, "Conflict")


async def test_fifty_concurrent_uploads_store_one_group(http, records):
    answers = await asyncio.gather(*(put(http, "g", inline_group()) for _ in range(50)))
    assert sorted(answer.status_code for answer in answers) == [200] * 49 + [201]
    assert records.count() == 2


async def test_the_receipt_of_a_repeat_tells_its_state(http, ledger: Ledger):
    await put(http, "g", inline_group())
    from insitu.types import StepSettings

    ledger.create_job("run", "k", ["g"], StepSettings(), "h")
    assert (await put(http, "g", inline_group())).json()["state"] == GroupState.CLAIMED


async def test_a_corrected_upload_is_not_served_the_old_call(http, ledger: Ledger, records):
    """The first upload breaks off after its inline call was stored; the second has another one."""
    lines = inline_group(size=1)
    assert (await put(http, "g", lines + b'{"trajectory": {}}\n')).status_code == 400
    assert (await put(http, "g", lines.replace(b"-0.5", b"-0.75"))).status_code == 201
    (call,) = records.get(ledger.group_record("run", "g").group.trajectories[0].call_ids)
    assert call.logprobs == [-0.75, -1.5]


async def test_calls_that_are_not_recorded_are_listed(http, records, make_call):
    records.append([make_call("c1")])
    answer = await put(http, "g", reference_group("c1", "c2", "c3"))
    assert answer.status_code == 422
    assert "2 named calls are not recorded here: c2, c3" in answer.json()["error"]["message"]
    assert (await http.get("/v1/runs/run/groups/g")).status_code == 404


@pytest.mark.parametrize("ended", ["cancelled", "broken"])
async def test_a_call_that_broke_off_is_refused_wherever_it_stands(http, records, make_call, ended):
    records.append([make_call("c1"), make_call("c2", finish_reason=ended), make_call("c3")])
    for named in (("c1", "c2", "c3"), ("c1", "c2")):
        answer = await put(http, "g", reference_group(*named))
        assert answer.status_code == 422
        assert f"names call c2, which ended `{ended}`" in answer.json()["error"]["message"]
    assert (await put(http, "g", reference_group("c1", "c3"))).status_code == 201


async def test_a_call_that_is_still_on_its_way_is_awaited(http, records, make_call):
    async def late():
        await asyncio.sleep(0.1)
        records.append([make_call("c1")])

    answer, _ = await asyncio.gather(put(http, "g", reference_group("c1")), late())
    assert answer.status_code == 201


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_id": "another"}, "holds a call of rollout 'another'"),
        ({"run": "another"}, "sampled from run 'another'"),
        ({"prompt_ids": [1] * 99}, "101 tokens, over max_seq_length 100"),
    ],
)
async def test_recorded_calls_that_do_not_fit_are_refused(http, records, make_call, changes, said):
    records.append([make_call("c1", **changes), make_call("c2")])
    named = [("c1",)] if "prompt_ids" in changes else [("c1",), ("c1", "c2")]
    for call_ids in named:
        answer = await put(http, "g", reference_group(*call_ids))
        assert answer.status_code == 422
        assert said in answer.json()["error"]["message"]


async def test_a_call_is_named_once_in_a_group(http, records, make_call):
    records.append([make_call("c1", rollout_id=None)])
    heads = [{"trajectory": {"rollout_id": name, "reward": 1.0, "call_ids": ["c1"]}} for name in "ab"]
    answer = await put(http, "g", ndjson({"group": {"num_trajectories": 2}}, *heads))
    assert answer.status_code == 400
    assert "call c1 is named twice" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"logprobs": [-0.5]}, 400),
        ({"logprobs": [-0.5, None]}, 400),
        ({"logprobs": [-0.5, -9999.0]}, 400),
        ({"logprobs": [-0.5, 3.0]}, 400),
        ({"logprobs": "x"}, 400),
        ({"output_ids": [4, -1]}, 400),
        ({"output_ids": [4, 2**31]}, 400),
        ({"output_ids": [4, 5.0]}, 400),
        ({"output_ids": [4, True]}, 400),
        ({"output_ids": [], "logprobs": []}, 400),
        ({"prompt_ids": []}, 400),
        ({"surprise": 1}, 400),
        ({"policy_version": None}, 400),
        ({"messages": [{"__proto__": {}}]}, 400),
        ({"finish_reason": "broken"}, 400),
        ({"protocol": "telegraph"}, 400),
        ({"prompt_ids": [1] * 99}, 422),
        ({"rollout_id": "another"}, 422),
        ({"run": "another"}, 422),
    ],
)
async def test_wrong_inline_calls_are_refused(http, changes, status):
    head = {"rollout_id": "r", "reward": 1.0, "num_inline_calls": 1}
    body = ndjson({"group": {"num_trajectories": 1}}, {"trajectory": head}, inline_call(**changes))
    answer = await put(http, "g", body)
    assert answer.status_code == status, answer.text
    assert (await http.get("/v1/runs/run/groups/g")).status_code == 404


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": None}, "reward"),
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"ending": "infrastructure"}, "carries no reward"),
        ({"ending": "tool_error"}, "carries no reward"),
        ({"ending": "odd"}, "ending"),
        ({"call_ids": []}, "exactly one of both"),
        ({"num_inline_calls": 1}, "exactly one of both"),
        ({"call_ids": ["c1", "c1"]}, "twice"),
        ({"call_ids": ["a b"]}, "call_ids"),
        ({"call_ids": ["inline:run:g:0:0"]}, "another upload"),
        ({"rollout_id": ""}, "rollout_id"),
        ({"metadata": {"a": {"constructor": 1}}}, "constructor"),
        ({"extra": 1}, "extra"),
    ],
)
async def test_wrong_trajectories_are_refused(http, records, make_call, changes, said):
    records.append([make_call("c1")])
    answer = await put(http, "g", reference_group("c1", **changes))
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


HEAD = {"group": {"num_trajectories": 1}}
TRAJECTORY = {"trajectory": {"rollout_id": "r", "reward": 1.0, "num_inline_calls": 1}}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "ends after line 0"),
        (b"\n\n", "ends after line 0"),
        (b"{", "line 1 is not JSON"),
        (b"\xff\n", "line 1 is not JSON"),
        (ndjson(TRAJECTORY), "line 1 holds trajectory, expected 'group'"),
        (ndjson({}), "line 1 holds nothing"),
        (ndjson({"group": None}), "line 1"),
        (ndjson(HEAD | TRAJECTORY), "line 1 holds group, trajectory"),
        (ndjson(HEAD), "ends after line 1, a 'trajectory' line was announced"),
        (ndjson(HEAD, TRAJECTORY), "ends after line 2, a 'call' line was announced"),
        (ndjson(HEAD, TRAJECTORY, inline_call(), inline_call()), "line 4 is beyond"),
        (ndjson({"group": {"num_trajectories": 0}}), "num_trajectories"),
        (b'{"group": {"num_trajectories": NaN}}', "not JSON"),
        (b'{"group": {"num_trajectories": 1e999}}', "not JSON"),
        (b"[" * 5000, "not JSON"),
    ],
)
async def test_bodies_that_are_not_a_group_are_refused(http, body, said):
    answer = await put(http, "g", body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


async def test_there_is_one_way_to_send_a_group(http):
    for kind in ("application/json", "text/plain", ""):
        answer = await http.put(
            "/v1/runs/run/groups/g", content=inline_group(), headers={"Content-Type": kind}
        )
        assert answer.status_code == 400
        assert "x-ndjson" in answer.json()["error"]["message"]


async def test_caps(http):
    long_line = ndjson({"group": {"num_trajectories": 1, "x": "y" * 70_000}})
    assert (await put(http, "g", long_line)).status_code == 413
    assert (await put(http, "g", ndjson({"group": {"num_trajectories": 33}}))).status_code == 413
    many = {"rollout_id": "r", "reward": 1.0, "num_inline_calls": 65}
    assert (await put(http, "g", ndjson(HEAD, {"trajectory": many}))).status_code == 413

    sent = 0

    async def long():
        nonlocal sent
        yield ndjson(HEAD)
        while sent < 4 * 2**20:  # without the cap it would be read to its end
            sent += 4096
            yield b"\n" * 4096

    assert (await put(http, "g", long())).status_code == 413
    assert sent < 2 * 2**20


async def test_unknown_runs_are_said_before_the_body_is_read(http):
    async def never():
        raise AssertionError("the body was read")
        yield b""

    assert (await put(http, "g", never(), run="nope")).status_code == 404
    assert (await put(http, "G", inline_group())).status_code == 400


async def test_a_full_disk_is_said_and_nothing_is_acknowledged(http, records, monkeypatch):
    def full(_calls):
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    with monkeypatch.context() as patch:
        patch.setattr(records, "append", full)
        answer = await put(http, "g", inline_group())
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "disk is full" in answer.json()["error"]["message"]
    assert (await http.get("/v1/runs/run/groups/g")).status_code == 404
    assert (await put(http, "g", inline_group())).status_code == 201


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=8),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
async def test_lines_are_the_same_however_the_body_is_cut(lines: list[bytes], cuts: list[int]):
    body = b"\n".join(lines)
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})

    async def chunks():
        for start, end in zip(places, [*places[1:], len(body)], strict=True):
            yield body[start:end]

    found = [line async for line in read_lines(chunks(), Limits())]
    assert found == [line for line in lines if line.strip()]


async def test_a_line_in_many_chunks_has_a_cap():
    async def chunks():
        while True:
            yield b"x" * 1000

    with pytest.raises(TooLarge, match="over 5000 bytes"):
        [line async for line in read_lines(chunks(), Limits(max_line_bytes=5000))]


async def test_an_unlabelled_call_hashes_as_before_there_were_functions(http, records):
    body = ndjson(
        {"group": {"num_trajectories": 1}},
        {"trajectory": {"rollout_id": "r", "reward": 1.0, "num_inline_calls": 2}},
        inline_call(),
        inline_call(function="planner"),
    )
    assert (await put(http, "g", body)).status_code == 201
    (trajectory,) = (await http.get("/v1/runs/run/groups/g")).json()["trajectories"]
    first, second = trajectory["call_ids"]
    assert first == "inline:run:g:0:e19c74c6bf0a4e346d32ba9b"
    assert [call.function for call in records.get([first, second])] == [None, "planner"]
