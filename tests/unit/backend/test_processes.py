"""No child outlives its supervisor, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from insitu.backend.children import Child
from insitu.errors import ChildFailed
from insitu.system.processes import MARK, end_marked, marked, spawn, start_janitor, tail

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from insitu.system.processes import spawn\n"
        f"child = spawn({SLEEP!r}, pathlib.Path({str(tmp_path / 'log')!r}))\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)  # the guard has become the command
    parent.kill()
    parent.wait()
    assert gone(child)


def test_janitor_ends_marked_processes_and_removes_the_scratch(tmp_path: Path) -> None:
    serve_id, scratch = uuid.uuid4().hex, tmp_path / "scratch"
    (scratch / "deep").mkdir(parents=True)
    orphan = subprocess.Popen(SLEEP, env={**os.environ, MARK: serve_id}, start_new_session=True)
    janitor = start_janitor(serve_id, scratch)
    assert [process.pid for process in marked(serve_id)] == [orphan.pid]
    assert janitor.stdin is not None
    janitor.stdin.close()  # as when the supervisor is killed
    assert janitor.wait(15) == 0
    assert orphan.wait(30) == -9
    assert not scratch.exists()


def test_end_marked_spares_others() -> None:
    mine, other = uuid.uuid4().hex, uuid.uuid4().hex
    victims = [subprocess.Popen(SLEEP, env={**os.environ, MARK: mine}) for _ in range(2)]
    spared = subprocess.Popen(SLEEP, env={**os.environ, MARK: other})
    time.sleep(0.2)
    assert end_marked(mine, 5.0) == []
    assert all(gone(victim.pid) for victim in victims)
    assert spared.poll() is None
    spared.kill()
    spared.wait()


def test_a_child_that_keeps_ending_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "doomed.py").write_text("import sys; sys.exit('no such device')")
    log = tmp_path / "doomed.log"
    child = Child("doomed", "doomed", [], {"PYTHONPATH": str(tmp_path)}, log)
    child.start()
    said = ""
    for _ in range(10):
        assert child.process is not None
        child.process.wait(30)
        try:
            assert child.keep_alive()
        except ChildFailed as error:
            said = str(error)
            break
    assert "ended 6 times in a minute" in said
    assert "no such device" in said


def test_tail_of_a_log(tmp_path: Path) -> None:
    child = spawn([sys.executable, "-c", "print('one'); print('two')"], tmp_path / "log")
    child.wait(30)
    assert tail(tmp_path / "log", 1) == "two"
    assert "no log at" in tail(tmp_path / "missing")
