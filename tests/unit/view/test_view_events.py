"""Events of a run: told once, in order, and again from wherever a client was cut off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from insitu.errors import InvalidRequest, Overloaded
from insitu.view.answers.overview import run_view
from insitu.view.http.events import Seen, Streams, admit, parse_seen, stream
from insitu.view.run import ViewedRun

QUICK = {"poll_seconds": 0.05, "max_seconds": 0.4}


async def told(run: ViewedRun, seen: Seen | None, **limits: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Every event of a stream until it ends: id, kind, data."""
    parts = [part async for part in stream(run, Streams(**{**QUICK, **limits}), seen)]
    assert parts[0].startswith(b"retry: ")
    found = []
    for part in parts[1:]:
        if part.startswith(b": "):
            continue
        lines = dict(line.split(": ", 1) for line in part.decode().strip().splitlines())
        found.append((lines["id"], lines["event"], orjson.loads(lines["data"])))
    return found


@pytest.fixture
def live(run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("insitu.view.run._PAUSE_SECONDS", 0.02)
    run = ViewedRun("run", run_copy, index=tmp_path / "index.db")
    yield run
    run.close()


async def test_a_stream_starts_with_what_happens_from_now_on(live):
    assert await told(live, None) == []


async def test_a_client_that_was_cut_off_gets_the_rest(live):
    view = run_view(live)
    num_records, num_rollouts = map(int, view.cursor.split("-"))
    everything = await told(live, Seen(0, 0))
    assert len(everything) == num_records
    assert everything[-1][0] == view.cursor
    assert [each[1] for each in everything][-1] == "ended"
    steps = [each[2]["point"] for each in everything if each[1] == "step"]
    assert [point["position"] for point in steps] == list(range(6))
    assert steps[2]["fates"] == dict(view.points[2].fates)
    for cut in (0, 5, num_records - 2):
        seen = parse_seen(everything[cut][0])
        assert await told(live, seen) == everything[cut + 1 :]
    assert await told(live, Seen(num_records, num_rollouts)) == []


async def test_new_rollouts_and_events_of_a_live_run(live, run_copy):
    view = run_view(live)
    seen = parse_seen(view.cursor)
    assert seen is not None
    listening = asyncio.create_task(told(live, seen, max_seconds=2.0))
    await asyncio.sleep(0.2)
    lines = (run_copy / "trajectories" / "epoch-0002-step-0001.jsonl").read_bytes().splitlines()
    with (run_copy / "trajectories" / "epoch-0003.jsonl").open("wb") as out:
        for number, line in enumerate(lines[:3]):
            out.write(
                orjson.dumps({**orjson.loads(line), "rollout_id": f"new-{number}", "tokens": None}) + b"\n"
            )
    await asyncio.sleep(0.6)
    with (run_copy / "journal.jsonl").open("ab") as out:
        out.write(orjson.dumps({"event": "failed", "at": 1.0, "epoch": 3, "message": "no room"}) + b"\n")
    events = await listening
    assert [(kind, data["num_rollouts"]) for _, kind, data in events] == [
        ("rollouts", seen.num_rollouts + 3),
        ("failed", seen.num_rollouts + 3),
    ]
    assert events[-1][2]["text"] == "no room"
    assert events[-1][0] == f"{seen.num_records + 1}-{seen.num_rollouts + 3}"


async def test_a_run_that_began_again_is_told_as_changed(live):
    ((at, kind, _),) = await told(live, Seen(10_000, 10_000))
    assert kind == "changed"
    assert at == run_view(live).cursor


async def test_a_long_absence_is_told_as_changed(live, monkeypatch):
    monkeypatch.setattr("insitu.view.http.events._MAX_EVENTS", 3)
    assert [kind for _, kind, _ in await told(live, Seen(0, 0))] == ["changed"]


async def test_a_silent_stream_shows_that_it_is_there_and_ends(live):
    live.use()
    streams = Streams(poll_seconds=0.01, heartbeat_seconds=0.01, max_seconds=1.0)
    parts = [part async for part in stream(live, streams, None)]
    assert b": still here\n\n" in parts
    assert streams.num_open == 0


async def test_a_server_that_stops_ends_its_streams(live):
    streams = Streams(poll_seconds=0.02, max_seconds=60.0)
    listening = asyncio.create_task(_drain(live, streams))
    await asyncio.sleep(0.2)
    assert streams.num_open == 1
    streams.stopping = True
    await asyncio.wait_for(listening, 5)
    assert streams.num_open == 0


async def _drain(run: ViewedRun, streams: Streams) -> None:
    async for _ in stream(run, streams, None):
        pass


def test_too_many_streams():
    with pytest.raises(Overloaded, match="2 event streams are open already"):
        admit(Streams(max_streams=2, num_open=2))


@pytest.mark.parametrize("value", ["x", "1", "1-", "-1-2", "1-2-3", "9999999999999-1", "1 -2"])
def test_ids_of_something_else(value):
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        parse_seen(value)
