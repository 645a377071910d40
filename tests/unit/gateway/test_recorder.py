"""The recorder: group commits, refusal while the store fails, nothing lost when it recovers."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from insitu.errors import DeadlineExceeded, InsituError
from insitu.gateway.recording import recorder as recorder_module
from insitu.gateway.recording.journal import Journal
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.recording.tally import Tally
from insitu.types import ModelCall


def a_call(number: int) -> ModelCall:
    return ModelCall(f"c{number}", None, "m", None, 0, "base", [1], [2], [-1.0], "stop")


class FakeStore:
    """Keeps batches; can be slow or full."""

    def __init__(self) -> None:
        self.batches: list[list[ModelCall]] = []
        self.full = False
        self.gate = threading.Event()
        self.gate.set()

    def append(self, calls: list[ModelCall], counted: list[str]) -> set[str]:
        assert self.gate.wait(30)
        if self.full:
            raise OSError(28, "No space left on device")
        self.batches.append(list(calls))
        return set()


@pytest.fixture(autouse=True)
def _fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_RETRY_SECONDS", 0.02)


def test_calls_that_arrive_during_a_commit_share_the_next_one() -> None:
    store = FakeStore()
    recorder = Recorder(store, max_backlog=100)  # type: ignore[arg-type]
    store.gate.clear()
    for i in range(10):
        recorder.submit(a_call(i))
        time.sleep(0.002)
    assert recorder.backlog == 10
    store.gate.set()
    recorder.flush(5)
    assert len(store.batches) == 2
    assert [c.id for batch in store.batches for c in batch] == [f"c{i}" for i in range(10)]
    assert recorder.num_recorded == 10
    recorder.close(1)


def test_a_wait_ends_with_what_was_there_before_it_however_much_follows() -> None:
    store = FakeStore()
    recorder = Recorder(store, max_backlog=100)  # type: ignore[arg-type]
    assert recorder.written().done()
    store.gate.clear()
    recorder.submit(a_call(0))
    first = recorder.written()
    abandoned = recorder.written()
    assert abandoned.cancel()
    written_then: list[int] = []
    first.add_done_callback(lambda _: written_then.append(recorder.num_recorded))
    time.sleep(0.02)  # the first batch is on its way
    for i in range(1, 5):
        recorder.submit(a_call(i))
    last = recorder.written()
    assert not first.done()
    store.gate.set()
    first.result(30)
    last.result(30)
    assert written_then == [1]  # it did not wait for the four behind it
    assert recorder.num_recorded == 5
    recorder.close(1)


def test_a_full_disk_refuses_new_calls_and_loses_none() -> None:
    store = FakeStore()
    recorder = Recorder(store, max_backlog=100)  # type: ignore[arg-type]
    store.full = True
    recorder.submit(a_call(1))
    with pytest.raises(DeadlineExceeded, match="No space left"):
        recorder.flush(0.1)
    assert "No space left" in (recorder.refusal() or "")
    store.full = False
    recorder.flush(5)
    assert recorder.refusal() is None
    assert [c.id for c in store.batches[0]] == ["c1"]
    recorder.close(1)


def test_a_long_backlog_is_a_refusal() -> None:
    store = FakeStore()
    recorder = Recorder(store, max_backlog=3)  # type: ignore[arg-type]
    store.gate.clear()
    for i in range(3):
        recorder.submit(a_call(i))
    assert "3 recorded calls are waiting" in (recorder.refusal() or "")
    store.gate.set()
    recorder.close(1)
    with pytest.raises(InsituError, match="not recorded"):
        recorder.submit(a_call(9))


def test_calls_share_a_commit_while_nobody_waits_and_are_in_the_journal_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_LINGER_SECONDS", 2.0)
    store = FakeStore()
    recorder = Recorder(store, max_backlog=100, journal=Journal(tmp_path))  # type: ignore[arg-type]
    for i in range(5):
        assert recorder.submit(a_call(i)) is None, "kept at once"
        time.sleep(0.005)
    [segment] = tmp_path.iterdir()
    assert (store.batches, len(segment.read_bytes().splitlines())) == ([], 5)
    deadline = time.monotonic() + 30
    while recorder.num_recorded < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [[call.id for call in batch] for batch in store.batches] == [[f"c{i}" for i in range(5)]]
    recorder.close(1)


def test_lingering_ends_when_somebody_waits_or_a_batch_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_LINGER_SECONDS", 600.0)
    store = FakeStore()
    recorder = Recorder(store, max_backlog=1000, journal=Journal(tmp_path))  # type: ignore[arg-type]
    recorder.submit(a_call(0))
    time.sleep(0.02)
    assert recorder.num_recorded == 0
    recorder.flush(30)
    tally = Tally("r")
    recorder.count(tally)
    assert tally.noted is not None
    tally.noted.result(30)
    for i in range(1, 1 + recorder_module._MAX_BATCH):
        recorder.submit(a_call(i))
    deadline = time.monotonic() + 30
    while recorder.backlog and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [len(batch) for batch in store.batches] == [1, 0, recorder_module._MAX_BATCH]
    recorder.close(1)
