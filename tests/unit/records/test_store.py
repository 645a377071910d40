"""The record store: exact round trips, linear space, several processes."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from insitu.errors import NotFound
from insitu.records import packing
from insitu.records.packing import FreshCall, Shared, pack_ids, unpack_call
from insitu.records.store import RecordStore
from insitu.types import ModelCall


def make_call(call_id: str, rollout_id: str | None = "ro", **changes: object) -> ModelCall:
    call = ModelCall(
        id=call_id,
        rollout_id=rollout_id,
        model="run",
        run="run",
        policy_step=2,
        policy_version="run@2",
        prompt_ids=[1, 2, 3],
        output_ids=[4, 5],
        logprobs=[-0.5, -1.25],
        finish_reason="stop",
        messages=[{"role": "user", "content": "hi"}],
        answer={"role": "assistant", "content": "ho"},
        sampling={"temperature": 1.0},
        timings={"total": 0.5},
        started_at=12.5,
        function="planner",
        protocol="messages",
    )
    return replace(call, **changes)


def conversation(num_turns: int, turn_tokens: int = 50) -> list[ModelCall]:
    """A rollout whose every turn extends the one before, in tokens and in messages."""
    calls, ids, messages = [], list(range(turn_tokens)), [{"role": "user", "content": "start " * 20}]
    tools = [{"type": "function", "function": {"name": "look", "description": "words " * 50}}]
    for turn in range(num_turns):
        output = [turn % 100] * turn_tokens
        logprobs = [-0.5] * turn_tokens
        calls.append(
            make_call(
                f"c{turn}",
                prompt_ids=ids,
                output_ids=output,
                logprobs=logprobs,
                messages=messages,
                tools=tools,
            )
        )
        ids = ids + output + [7, 8]
        messages = [
            *messages,
            {"role": "assistant", "content": f"a{turn}"},
            {"role": "user", "content": f"u{turn}"},
        ]
    return calls


@pytest.fixture
def store(database_url: str) -> Iterator[RecordStore]:
    opened = RecordStore(database_url)
    yield opened
    opened.close()


def test_round_trip_and_order(store: RecordStore) -> None:
    calls = [
        make_call("a", None),
        make_call("b", messages=None, tools=None, answer={"text": "x"}),
        make_call("c"),
    ]
    store.append(calls)
    assert store.get(["c", "a", "b"]) == [calls[2], calls[0], calls[1]]
    assert store.by_rollout("ro") == calls[1:]
    assert store.exists(["a", "zz"]) == {"a"}


def test_a_rollout_is_listed_with_its_sizes_with_or_without_tokens(store: RecordStore) -> None:
    calls = conversation(5)
    store.append(calls)
    sizes = [(len(c.prompt_ids), len(c.output_ids)) for c in calls]
    for tokens in (True, False):
        listed = store.list_rollout("ro", tokens=tokens)
        assert [(one.num_prompt_tokens, one.num_output_tokens) for one in listed] == sizes
        assert [one.shared.parent for one in listed] == [None, "c0", "c1", "c2", "c3"]
        for one, call in zip(listed, calls, strict=True):
            own = {"messages": (call.messages or [])[one.shared.num_messages :]}
            own |= {"tools": None} if one.shared.tools else {}
            own |= {"prompt_ids": call.prompt_ids[one.shared.num_tokens :]}
            own |= {} if tokens else {"prompt_ids": [], "output_ids": [], "logprobs": []}
            assert one.call == replace(call, **own)
    assert store.list_rollout("another", tokens=True) == []


def test_listing_a_rollout_is_one_indexed_query(tmp_path: Path) -> None:
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    store.append(conversation(3))
    queries: list[str] = []
    event.listen(
        store._engine, "before_cursor_execute", lambda *a: queries.append(a[2]) if "SELECT" in a[2] else None
    )
    store.list_rollout("ro", tokens=False)
    (query,) = queries
    with store._engine.begin() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", ("ro",) * query.count("?")).all()
    assert "USING INDEX ix_calls_rollout_id" in str(plan)
    assert "TEMP B-TREE" not in str(plan)


def test_missing_calls_are_listed(store: RecordStore) -> None:
    store.append([make_call("a")])
    with pytest.raises(NotFound, match="2 recorded calls do not exist: x, y"):
        store.get(["x", "a", "y"])


def test_a_stored_id_keeps_its_first_content(store: RecordStore) -> None:
    store.append([make_call("a")])
    store.append([make_call("a", output_ids=[9, 9]), make_call("b")])
    assert store.get(["a"])[0].output_ids == [4, 5]
    assert store.exists(["b"]) == {"b"}


def test_long_rollouts_cost_linear_space(tmp_path: Path) -> None:
    sizes = {}
    for num_turns in (25, 50, 100):
        url = f"sqlite:///{tmp_path}/{num_turns}.db"
        store, calls = RecordStore(url), conversation(num_turns)
        for call in calls:
            store.append([call])
        assert store.get([c.id for c in calls]) == calls
        with store._engine.begin() as connection:
            columns = ("prompt_ids", "output_ids", "logprobs", "body")
            query = f"select sum({' + '.join(f'length({c})' for c in columns)}) from calls"
            sizes[num_turns] = connection.exec_driver_sql(query).scalar_one()
        store.close()
    assert sizes[100] < 2.1 * sizes[50] < 4.5 * sizes[25]


def test_one_late_call_is_rebuilt_without_the_rest(store: RecordStore) -> None:
    calls = conversation(30)
    store.append(calls)
    assert store.get([calls[-1].id]) == [calls[-1]]


def test_branches_and_changed_history_are_kept_exactly(store: RecordStore) -> None:
    first, second = conversation(2)
    edited = make_call("edited", prompt_ids=[9, *second.prompt_ids[1:]], messages=second.messages)
    branch = replace(second, id="branch", output_ids=[3, 3], logprobs=[-1.0, -1.0])
    other = make_call("other", prompt_ids=[5, 5, 5], messages=[{"role": "user", "content": "sub-agent"}])
    calls = [first, other, second, edited, branch]
    store.append(calls)
    assert store.by_rollout("ro") == calls


def test_a_new_process_continues_a_rollout(database_url: str) -> None:
    url, calls = database_url, conversation(4)
    for part in (calls[:2], calls[2:]):
        store = RecordStore(url)
        store.append(part)
        store.close()
    assert RecordStore(url).by_rollout("ro") == calls


def test_a_failed_append_leaves_nothing_and_no_dangling_parent(store: RecordStore) -> None:
    calls = conversation(2)
    with store._engine.begin() as connection:
        connection.exec_driver_sql("alter table calls rename to away")
    with pytest.raises(DBAPIError):
        store.append([calls[0]])
    with store._engine.begin() as connection:
        connection.exec_driver_sql("alter table away rename to calls")
    store.append([calls[1]])
    assert store.by_rollout("ro") == [calls[1]]


_ids = st.lists(st.integers(0, 50), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.booleans(), _ids, _ids, st.text(max_size=5)), max_size=12),
    group=st.integers(1, 4),
)
def test_whatever_a_rollout_does_comes_back(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[bool, list[int], list[int], str]], group: int
) -> None:
    store = RecordStore(f"sqlite:///{tmp_path_factory.mktemp('r')}/calls.db")
    calls: list[ModelCall] = []
    for i, (extends, ids, output, text) in enumerate(turns):
        before = calls[-1] if calls and extends else None
        prompt = before.prompt_ids + before.output_ids + ids if before else ids
        messages = [*((before.messages or []) if before else []), {"role": "user", "content": text}]
        logprobs = [-0.5] * len(output)
        changes = {"prompt_ids": prompt, "output_ids": output, "logprobs": logprobs, "messages": messages}
        calls.append(make_call(f"c{i}", **changes))
    for start in range(0, len(calls), group):
        store.append(calls[start : start + group])
    assert store.by_rollout("ro") == calls
    assert store.get([c.id for c in reversed(calls)]) == calls[::-1]
    store.close()


def test_writers_and_readers_share_the_file(database_url: str) -> None:
    url, failures = database_url, []

    def write(name: str) -> None:
        try:
            store = RecordStore(url)
            for i in range(20):
                store.append([make_call(f"{name}-{i}", name)])
                assert len(store.by_rollout(name)) == i + 1
            store.close()
        except Exception as error:  # noqa: BLE001 (reported by the test below)
            failures.append(error)

    threads = [threading.Thread(target=write, args=(f"w{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert RecordStore(url).count() == 80


def test_a_new_file_that_another_process_is_setting_up_is_waited_for(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "calls.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    ends = threading.Timer(0.3, other.execute, ["COMMIT"])
    ends.start()
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    assert store.count() == 0
    store.close()
    ends.join()
    other.close()


def test_what_append_acknowledged_survives_a_kill(database_url: str) -> None:
    script = textwrap.dedent("""
        import sys
        from insitu.records.store import RecordStore
        from insitu.types import ModelCall
        store = RecordStore(sys.argv[1])
        for i in range(100000):
            store.append([ModelCall(f"c{i}", "ro", "m", None, 0, "base", [1], [2], [-1.0], "stop")])
            print(i, flush=True)
    """)
    url = database_url
    child = subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for _ in range(50):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    acknowledged = 50 + len(child.stdout.readlines())
    child.wait(30)
    assert acknowledged <= RecordStore(url).count() <= acknowledged + 1


def test_rows_of_earlier_releases_are_chat(tmp_path: Path) -> None:
    row = FreshCall(make_call("c")).row(Shared())
    body = orjson.loads(zlib.decompress(row["body"]))
    del body["protocol"]
    assert unpack_call(row | {"body": zlib.compress(orjson.dumps(body))}, None) == make_call(
        "c", protocol="chat"
    )


def test_calls_that_broke_off_are_told_apart(database_url: str) -> None:
    store = RecordStore(database_url)
    ended = {"a": "stop", "b": "cancelled", "c": "broken", "d": "length"}
    store.append([make_call(name, finish_reason=reason) for name, reason in ended.items()])
    heads = store.heads([*ended, "nobody"])
    assert {name: head.finish_reason for name, head in heads.items()} == ended
    assert [call.id for call in store.of_run("run", 0)] == ["a", "d"]
    store.close()


def test_a_call_is_packed_and_read_once_however_many_conversations_it_may_extend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = Counter[int]()

    def counting(values: Sequence[int]) -> bytes:
        packed[len(values)] += 1
        return pack_ids(values)

    monkeypatch.setattr(packing, "pack_ids", counting)
    open_ones = [[1, 2], [1, 2, 3, 9], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
    said = [{"role": "user", "content": str(number)} for number in range(4)]
    tails = [
        FreshCall(make_call(f"c{i}", prompt_ids=ids[:-1], output_ids=ids[-1:], messages=said[: i + 1])).tail()
        for i, ids in enumerate(open_ones)
    ]
    packed.clear()
    fresh = FreshCall(
        make_call("new", prompt_ids=[1, 2, 3, 4, 5], output_ids=[6, 7, 8], messages=said), tails
    )
    assert [fresh.shared_with(tail).num_tokens for tail in tails] == [2, 0, 0, 4]
    assert [fresh.shared_with(tail).num_messages for tail in tails] == [1, 2, 3, 4]
    assert fresh.row(fresh.shared_with(tails[3]))["prompt_ids"] == pack_ids([5])
    assert packed == {5: 1, 3: 1}
