"""The journal survives being cut off anywhere in its last records, and hides no damage."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from insitu.errors import InsituError, InvalidRequest
from insitu.harness.files.journal import Journal
from insitu.harness.files.json_lines import DamagedFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def written(path: Path, count: int = 5) -> list[dict[str, object]]:
    with Journal(path) as journal:
        return [
            journal.append("epoch", {"epoch": n, "reward": n / 3, "note": "größer\n{"}) for n in range(count)
        ]


def test_events_come_back_in_order(path: Path) -> None:
    before = time.time()
    with Journal(path) as journal:
        journal.append("run_started", {"seed": 1})
        journal.append("epoch_ended", {"epoch": 0, "job": {"step": 1}})
        journal.append("epoch_ended", {"epoch": 1, "job": None})
    with Journal(path) as journal:
        assert [(e["event"], e.get("epoch")) for e in journal.records()] == [
            ("run_started", None),
            ("epoch_ended", 0),
            ("epoch_ended", 1),
        ]
        assert journal.records()[1]["job"] == {"step": 1}
        assert before <= journal.records()[0]["at"] <= time.time()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_cut_at_every_byte_of_the_last_three_records(path: Path) -> None:
    events = written(path)
    whole = path.read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    for cut in range(ends[-4], len(whole) + 1):
        path.write_bytes(whole[:cut])
        left = sum(end <= cut for end in ends) - 1
        with Journal(path) as journal:
            assert journal.records() == events[:left], cut
            assert path.stat().st_size == ends[left], "the rest is cut off"
            again = journal.append("after", {"cut": cut})
        with Journal(path) as journal:
            assert journal.records() == [*events[:left], again]


@pytest.mark.parametrize("tail", [b"{\n", b"\0\0\0\0", b"5\n", b"\n", b'{"event": NaN}\n', b"\xff\xfe\n"])
def test_last_line_that_is_no_event_is_dropped(path: Path, tail: bytes) -> None:
    events = written(path)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with Journal(path) as journal:
        assert journal.records() == events
    assert path.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"\0", b"\n", b"}"])
def test_damage_inside_is_fatal_with_its_place(path: Path, damage: bytes) -> None:
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    place = len(lines[0]) + len(lines[1])
    spoilt = b"".join(lines[:2]) + damage + b"".join(lines[2:])
    path.write_bytes(spoilt)
    with pytest.raises(DamagedFile, match=rf"line 3, at byte {place}\b") as caught:
        Journal(path)
    assert isinstance(caught.value, InsituError)
    assert f"truncate -s {place} " in caught.value.hint
    assert path.read_bytes() == spoilt, "a damaged file is left as it was"


def test_torn_tail_after_damage_does_not_hide_it(path: Path) -> None:
    written(path, 2)
    path.write_bytes(path.read_bytes() + b'{"broken\n' + b'{"torn')
    with pytest.raises(DamagedFile, match="line 3"):
        Journal(path)


def test_figures_that_are_no_numbers_become_null(path: Path) -> None:
    with Journal(path) as journal:
        event = journal.append("step", {"metrics": {"kl": math.nan, "loss": [1.0, math.inf]}})
        assert event["metrics"] == {"kl": None, "loss": [1.0, None]}
    assert json.loads(path.read_text())["metrics"] == {"kl": None, "loss": [1.0, None]}


def test_values_that_are_not_json_are_refused_and_leave_nothing(path: Path) -> None:
    with Journal(path) as journal:
        with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
            journal.append("bad", {"value": object()})
        assert journal.records() == []
    assert path.read_bytes() == b""


def test_an_event_is_one_write_and_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    write, fsync = os.write, os.fsync
    with Journal(path) as journal:
        monkeypatch.setattr(os, "write", lambda fd, data: (done.append("write"), write(fd, data))[1])
        monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd))[1])
        journal.append("event", {"text": "x" * 100_000})
        assert done == ["write", "fsync"]


def test_full_disk_leaves_no_half_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = written(path, 2)
    write = os.write
    with Journal(path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
            with pytest.raises(InsituError, match="only 7 of"):
                journal.append("lost", {})

            def full(fd: int, data: bytes) -> int:
                write(fd, data[:3])
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(os, "write", full)
            with pytest.raises(InsituError, match="No space left"):
                journal.append("lost", {})
        events.append(journal.append("kept", {}))
        assert journal.records() == events
    with Journal(path) as journal:
        assert journal.records() == events


def test_closed_journal_says_so(path: Path) -> None:
    journal = Journal(path)
    journal.close()
    journal.close()
    with pytest.raises(InsituError, match="is closed"):
        journal.append("late", {})


def test_what_was_appended_survives_kill(path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from insitu.harness.files.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for n in range(10**6):\n"
        "    journal.append('event', {'n': n}); print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as out:
        seen = [int(out.readline()) for _ in range(50)]
        process.send_signal(signal.SIGKILL)
        seen += [int(line) for line in out.read().split()]
    process.wait(30)
    with Journal(path) as journal:
        assert [e["n"] for e in journal.records()][: len(seen)] == seen
