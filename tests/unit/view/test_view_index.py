"""The index holds what the run's files hold, however they grew; the files are never touched."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from insitu.errors import Unavailable
from insitu.harness.files.rollout_store import read_rollouts
from insitu.view.reading.index import RunIndex
from insitu.view.reading.run_files import RunFiles
from insitu.view.reading.schema import index_path, remove

COLUMNS = "s.name, r.rollout_id, r.example_id, r.position, r.generation, r.ending, r.reward, r.num_calls, r.num_output_tokens, r.policy_steps, r.seconds"  # noqa: E501


def indexed(index: RunIndex) -> list[tuple[Any, ...]]:
    sql = f"SELECT {COLUMNS} FROM rollouts r JOIN stores s ON s.id = r.store"
    return sorted(index.read(lambda db: db.execute(sql).fetchall()), key=str)


def stored(run: Path) -> list[tuple[Any, ...]]:
    """The same rows, read from the files by the harness's own reader."""
    found = []
    for file in (run / "trajectories").glob("*.jsonl"):
        for each in read_rollouts(file):
            figures = each.figures
            steps = orjson.dumps(figures.policy_steps).decode()
            row = (file.stem, each.rollout_id, each.example_id, each.index, each.generation, str(each.ending))
            found.append(
                (*row, each.reward, figures.num_calls, figures.num_output_tokens, steps, each.seconds)
            )
    return sorted(found, key=str)


def open_index(run: Path, path: Path) -> RunIndex:
    return RunIndex(RunFiles.open(run), path)


def read_all(index: RunIndex) -> None:
    while not index.refresh():
        pass


def test_the_index_equals_the_files(finished_run, tmp_path):
    index = open_index(finished_run, tmp_path / "index.db")
    read_all(index)
    rows = stored(finished_run)
    assert len(rows) == 3 * 6 * 4 + 3 * 6
    assert indexed(index) == rows
    assert index.progress().share == 1.0
    assert index.problems() == []
    index.close()


def test_a_second_process_finds_the_index_and_reads_nothing_twice(finished_run, tmp_path, monkeypatch):
    first = open_index(finished_run, tmp_path / "index.db")
    read_all(first)
    monkeypatch.setattr("insitu.view.reading.index.entry_of", lambda *_: pytest.fail("read again"))
    second = open_index(finished_run, tmp_path / "index.db")
    read_all(second)
    assert indexed(second) == stored(finished_run)
    first.close()
    second.close()


def test_a_growing_file_is_read_line_by_line(run_copy, tmp_path):
    """Whatever the moment: a line counts once its end is there, and the end result is that of one go."""
    file = run_copy / "trajectories" / "epoch-0001-step-0000.jsonl"
    whole = file.read_bytes()
    index = open_index(run_copy, tmp_path / "index.db")
    for end in (0, 10, 130, len(whole) // 3, len(whole) // 2, len(whole) - 1, len(whole)):
        with file.open("r+b") as out:  # the same file grows
            out.truncate(end)
            out.seek(0)
            out.write(whole[:end])
        read_all(index)
        assert indexed(index) == stored(run_copy), end
    assert len(indexed(index)) == 3 * 6 * 4 + 3 * 6
    index.close()


def test_a_small_budget_goes_on_where_it_stopped(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr("insitu.view.reading.index._LINES_AT_ONCE", 5)
    index = open_index(finished_run, tmp_path / "index.db")
    shares = []
    while not index.refresh(budget_seconds=1e-4):
        shares.append(index.progress().share)
    assert shares == sorted(shares)
    assert indexed(index) == stored(finished_run)
    index.close()


def test_the_last_line_of_a_rollout_counts(run_copy, tmp_path):
    file = run_copy / "trajectories" / "epoch-0000-step-0001.jsonl"
    index = open_index(run_copy, tmp_path / "index.db")
    read_all(index)
    line = orjson.loads(file.read_bytes().splitlines()[0])
    line |= {"reward": 0.125, "output": "the better answer"}
    with file.open("ab") as out:
        out.write(orjson.dumps(line) + b"\n")
    read_all(index)
    assert indexed(index) == stored(run_copy)
    sql = "SELECT reward, answer FROM rollouts WHERE rollout_id = ?"
    found = index.read(lambda db: db.execute(sql, (line["rollout_id"],)).fetchall())
    assert found == [(0.125, "the better answer")]
    index.close()


def test_files_that_are_set_aside_replaced_or_deleted(run_copy, tmp_path):
    folder = run_copy / "trajectories"
    index = open_index(run_copy, tmp_path / "index.db")
    read_all(index)
    aside = folder / "epoch-0001-step-0000.jsonl"
    kept = aside.read_bytes()
    aside.rename(folder / "epoch-0001-step-0000-failed-1.jsonl")
    aside.write_bytes(b"".join(kept.splitlines(keepends=True)[:2]))
    (folder / "epoch-0000-step-0000.jsonl").unlink()
    read_all(index)
    assert indexed(index) == stored(run_copy)
    kinds = dict(index.read(lambda db: db.execute("SELECT name, kind FROM stores").fetchall()))
    assert kinds["epoch-0001-step-0000-failed-1"] == "set_aside"
    assert "epoch-0000-step-0000" not in kinds
    fates = index.read(lambda db: db.execute("SELECT DISTINCT fate FROM rollouts").fetchall())
    assert ("set_aside",) in fates
    index.close()


def test_lines_that_are_not_rollouts_are_counted_and_named(run_copy, tmp_path):
    file = run_copy / "trajectories" / "epoch-0000-step-0000.jsonl"
    file.write_bytes(b'{"rollout_id": 3}\nnot JSON\n[]\n' + file.read_bytes())
    index = open_index(run_copy, tmp_path / "index.db")
    read_all(index)
    assert len(indexed(index)) == 3 * 6 * 4 + 3 * 6
    assert index.problems() == [f"{file}: 3 lines are not rollouts"]
    index.close()


def test_an_index_that_is_not_a_database_is_rebuilt(finished_run, tmp_path):
    (tmp_path / "index.db").write_bytes(b"not a database" * 1000)
    index = open_index(finished_run, tmp_path / "index.db")
    read_all(index)
    assert indexed(index) == stored(finished_run)
    index.close()


def test_an_index_of_another_version_is_rebuilt(finished_run, tmp_path):
    with sqlite3.connect(tmp_path / "index.db") as old:
        old.execute("CREATE TABLE stores (what TEXT)")
        old.execute("PRAGMA user_version=99")
    old.close()
    index = open_index(finished_run, tmp_path / "index.db")
    read_all(index)
    assert indexed(index) == stored(finished_run)
    index.close()


def test_a_reader_that_comes_while_another_writes_does_not_wait_and_cannot_write(finished_run, tmp_path):
    index = open_index(finished_run, tmp_path / "index.db")
    read_all(index)
    with closing(sqlite3.connect(index.path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert indexed(index) == stored(finished_run)
        second = open_index(finished_run, index.path)
        assert indexed(second) == stored(finished_run)
        assert time.monotonic() - began < 2, "a busy index is waited for 5 s"
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            index.read(lambda db: db.execute("DELETE FROM rollouts"))
        second.close()
    index.close()


def test_a_reader_makes_no_file(finished_run, tmp_path):
    index = open_index(finished_run, tmp_path / "index.db")
    remove(index.path)
    with pytest.raises(Unavailable, match="unable to open database file"):
        index.read(lambda db: db.execute("SELECT 1").fetchall())
    assert not index.path.exists()
    index.close()


def test_an_index_that_another_process_fills_is_shown_as_far_as_it_is(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr("insitu.view.reading.schema._BUSY_SECONDS", 0.05)
    index = open_index(finished_run, tmp_path / "index.db")
    with closing(sqlite3.connect(index.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert not index.refresh()
        assert index.progress().share == 0.0
    read_all(index)
    assert indexed(index) == stored(finished_run)
    index.close()


def test_an_index_without_room_on_its_disk_says_so_and_goes_on_when_there_is(finished_run, tmp_path):
    index = open_index(finished_run, tmp_path / "index.db")
    writer = index._db  # pyright: ignore[reportPrivateUsage]
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(Unavailable, match=r"cannot be used: database or disk is full") as raised:
        read_all(index)
    assert "make room" in (raised.value.hint or "")
    writer.execute("PRAGMA max_page_count=1000000")
    read_all(index)
    assert indexed(index) == stored(finished_run)
    index.close()


def test_nothing_of_the_run_is_changed(run_copy):
    def state() -> dict[str, tuple[int, bytes]]:
        return {
            str(file): (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"")
            for file in [run_copy, *run_copy.rglob("*")]
        }

    before = state()
    index = RunIndex(RunFiles.open(run_copy))
    read_all(index)
    index.close()
    assert state() == before
    assert index.path.parent == run_copy.parent  # beside the run, not in it
    assert index.path.stat().st_mode & 0o777 == 0o600


def test_a_run_on_a_read_only_disk_has_its_index_in_the_cache(run_copy, tmp_path, monkeypatch):
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    assert index_path(run_copy).parent == run_copy.parent
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert index_path(run_copy).parent == tmp_path / "cache" / "view"
    assert index_path(run_copy) != index_path(run_copy.parent)
