"""An answer given is a call recorded: kill -9 loses none, and a loss is never taken for a whole rollout."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import orjson
import pytest

from insitu.errors import UpstreamError
from insitu.gateway.recording import journal as journal_module
from insitu.gateway.recording.journal import Journal, journal_folder, recover
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway_client import GatewayClient
from insitu.records.store import RecordStore
from insitu.types import ModelCall
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import API, MESSAGES, GatewayUnderTest, StartGateway, until
from tests.unit.gateway.test_process import answers, free_port, start


def a_call(number: int, **changes: object) -> ModelCall:
    call = ModelCall(f"c{number}", "r", "m", None, 0, "base", [1, number], [2], [-1.0], "stop")
    return replace(call, **changes)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path):
    opened = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    yield opened
    opened.close()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stream", [False, True])
async def test_answered_calls_survive_kill_9(tmp_path: Path, stream: bool) -> None:
    url, port = f"sqlite:///{tmp_path}/calls.db", free_port()
    gateway = f"http://127.0.0.1:{port}"
    answered: list[str] = []
    async with (
        StandinEngine(Behaviour(delay_seconds=(0.0, 0.3))) as engine,
        aiohttp.ClientSession() as session,
    ):

        async def rollout(number: int) -> None:
            for _ in range(50):
                body = {"model": "tiny", "messages": MESSAGES, "stream": stream}
                path = f"{gateway}/rollouts/r{number}/v1/chat/completions"
                async with session.post(path, json=body, headers=API) as got:
                    whole = await got.read()
                    assert not stream or b"[DONE]" in whole or not whole
                    if not stream or b'"finish_reason":"stop"' in whole:
                        answered.append(got.headers["x-insitu-call-id"])

        child = await start("--port", str(port), "--records", url, "--upstream", engine.url)
        await until(lambda: answers(session, gateway), "the gateway answers", 60)
        rollouts = [asyncio.create_task(rollout(n)) for n in range(16)]
        await until(lambda: len(answered) >= 33, "33 calls are answered", 60)
        child.kill()
        await child.wait()
        await asyncio.gather(*rollouts, return_exceptions=True)
        child = await start("--port", str(port), "--records", url, "--upstream", engine.url)
        try:
            await until(lambda: answers(session, gateway), "the gateway is back", 60)
            records = RecordStore(url)
            assert records.exists(answered) == set(answered)
            records.close()
            async with GatewayClient(gateway, "default") as client:
                record = await client.rollout_record("r0")
            assert record.seen is None, "a count across a restart is not to be trusted"
        finally:
            child.terminate()
            assert await child.wait() == 0
    assert list(Path(f"{tmp_path}/calls.db.journal").iterdir()) == [], "nothing is left after a clean end"


async def test_nothing_is_answered_before_the_rollout_is_noted(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, append = threading.Event(), RecordStore.append

    def slow(self: RecordStore, calls: list[ModelCall], counted: list[str]) -> set[str]:
        assert gate.wait(30)
        return append(self, calls, counted)

    monkeypatch.setattr(RecordStore, "append", slow)
    gateway: GatewayUnderTest = await start_gateway(record_seconds=0.3)
    path = "/rollouts/r/v1/chat/completions"
    status, body, _ = await gateway.post(path)
    assert (status, body["error"]["type"]) == (503, "Unavailable")
    async with gateway.session.post(
        gateway.url + path, json={"model": "tiny", "messages": MESSAGES, "stream": True}, headers=API
    ) as got:
        assert got.status == 503, "not even the first token"
    gate.set()
    assert (await gateway.post(path))[0] == 200


def test_segments_go_once_their_calls_are_stored(
    tmp_path: Path, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_MAX_SEGMENT_BYTES", 1000)
    folder = tmp_path / "journal"
    recorder = Recorder(store, max_backlog=1000, journal=Journal(folder))
    for number in range(100):
        assert recorder.submit(a_call(number)) is None
        assert len(list(folder.iterdir())) <= 60
    recorder.flush(10)
    assert len(list(folder.iterdir())) == 1
    assert store.count() == 100
    recorder.close(5)
    assert list(folder.iterdir()) == []


def test_torn_lines_are_skipped_and_the_rest_is_recovered(tmp_path: Path, store: RecordStore) -> None:
    folder = tmp_path / "journal"
    lost = Journal(folder)
    for number in range(3):
        lost.add(a_call(number), number + 1)
    lost.close(everything_is_written=False)
    [segment] = folder.iterdir()
    segment.write_bytes(segment.read_bytes()[:-10])
    assert recover(folder, store) == 2
    assert store.exists(["c0", "c1", "c2"]) == {"c0", "c1"}
    assert store.get(["c1"])[0].prompt_ids == [1, 1]
    [rejected] = folder.iterdir()
    assert rejected.suffix == ".rejected"
    assert recover(folder, store) == 0, "what was set aside is not read again"


ODD: dict[str, bytes] = {
    "an id beyond all": orjson.dumps(asdict(a_call(7, output_ids=[2**40]))),
    "an id that is a text": orjson.dumps(asdict(a_call(7, output_ids=["x"]))),
    "ids that are an object": orjson.dumps(asdict(a_call(7, prompt_ids={"a": 1}))),
    "logprobs that are a number": orjson.dumps(asdict(a_call(7, logprobs=1))),
    "an id that is a list": orjson.dumps(asdict(a_call(7, id=["c7"]))),
    "a step that is huge": orjson.dumps(asdict(a_call(7, policy_step=2**70 % 2**63))),
    "a time that is a text": orjson.dumps(asdict(a_call(7, started_at="noon"))),
    "a lone surrogate": orjson.dumps(asdict(a_call(7))).replace(b'"m"', b'"\\ud800"'),
    "a number": b"1",
    "nothing": b"null",
    "an object of others": b"{}",
    "bytes": bytes(range(11, 200)),
    "an empty line": b"",
    "a list": b"[1, 2]",
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_line_keeps_a_gateway_from_starting(
    tmp_path: Path, store: RecordStore, odd: bytes, place: int
) -> None:
    folder = tmp_path / "journal"
    lost = Journal(folder)
    lost.add(a_call(0), 1)
    lost.add(a_call(1), 2)
    lost.close(everything_is_written=False)
    [segment] = folder.iterdir()
    lines = segment.read_bytes().splitlines(keepends=True)
    lines.insert(place, odd + b"\n")
    segment.write_bytes(b"".join(lines))
    recover(folder, store)
    assert store.exists(["c0", "c1"]) == {"c0", "c1"}
    left = list(folder.iterdir())
    if store.count() == 2:  # the store did not take it: it is kept, where somebody may look at it
        assert [each.read_bytes() for each in left] == [odd + b"\n"]
        assert left[0].suffix == ".rejected"
    assert recover(folder, store) == 0


def test_a_segment_that_cannot_be_read_keeps_no_gateway_from_starting(
    tmp_path: Path, store: RecordStore
) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "1-a.calls").mkdir()
    (folder / "1-b.calls").symlink_to(tmp_path / "nowhere")
    lost = Journal(folder)
    lost.add(a_call(0), 1)
    lost.close(everything_is_written=False)
    assert recover(folder, store) == 1


def test_the_journal_of_a_living_process_is_left_alone(tmp_path: Path, store: RecordStore) -> None:
    folder = tmp_path / "journal"
    living = Journal(folder)
    living.add(a_call(0), 1)
    assert recover(folder, store) == 0
    assert len(list(folder.iterdir())) == 1
    living.close(everything_is_written=True)


def test_without_a_journal_the_answer_waits_for_the_store(store: RecordStore) -> None:
    recorder = Recorder(store, max_backlog=10)
    pending = recorder.submit(a_call(0))
    assert pending is not None
    pending.result(30)
    assert store.exists(["c0"]) == {"c0"}
    recorder.close(5)
    assert journal_folder("sqlite://") is None
    assert journal_folder("postgresql://host/name") is None


def test_a_full_disk_makes_the_answer_wait(
    tmp_path: Path, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(store, max_backlog=10, journal=Journal(tmp_path / "journal"))
    monkeypatch.setattr(journal_module.os, "write", lambda *_: 3)
    pending = recorder.submit(a_call(0))
    monkeypatch.undo()
    assert pending is not None
    pending.result(30)
    [segment] = (tmp_path / "journal").iterdir()
    assert os.path.getsize(segment) == 0
    recorder.close(5)


def test_one_call_that_cannot_be_stored_is_lost_alone(store: RecordStore) -> None:
    recorder = Recorder(store, max_backlog=100)
    bad = a_call(1, policy_step=2**70)
    for call in (a_call(0), bad, a_call(2)):
        recorder.submit(call)
    recorder.flush(5)
    recorder.submit(a_call(3))
    recorder.flush(5)
    assert store.exists(["c0", "c1", "c2", "c3"]) == {"c0", "c2", "c3"}
    assert (recorder.num_recorded, recorder.num_lost, recorder.backlog) == (3, 1, 0)
    assert recorder.refusal() is None
    recorder.close(5)


def test_a_call_that_no_journal_takes_is_not_answered(tmp_path: Path, store: RecordStore) -> None:
    recorder = Recorder(store, max_backlog=100, journal=Journal(tmp_path / "journal"))
    with pytest.raises(UpstreamError, match="cannot be recorded"):
        recorder.submit(a_call(1, answer={"content": "\ud800"}))
    assert recorder.backlog == 0
    recorder.close(5)
