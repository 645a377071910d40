"""An engine that starts beside others takes the time that they leave, and its full share when it serves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.backend.fleet import background
from insitu.system.processes import end_child, spawn


@pytest.fixture
def session(tmp_path: Path) -> Iterator[int]:
    child = spawn([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    try:
        yield child.pid
    finally:
        end_child(child, 3.0)


def niceness(session: int) -> list[int]:
    """The session's place among sessions, where Linux has one, and that of its process."""
    group = Path(f"/proc/{session}/autogroup")
    among = [int(group.read_text().rpartition(" ")[2])] if group.exists() else []
    return [*among, os.getpriority(os.PRIO_PROCESS, session)]


def test_a_session_goes_to_the_background_and_comes_back(session: int) -> None:
    usual = niceness(session)
    background.to_background(session)
    lowered = [19 if background._may_raise() or place < len(usual) - 1 else 0 for place in range(len(usual))]
    assert niceness(session) == lowered
    background.to_foreground(session)
    assert niceness(session) == usual


def test_a_priority_that_could_not_be_raised_again_is_not_lowered(
    session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_may_raise", lambda: False)
    before = os.getpriority(os.PRIO_PROCESS, session)
    background.to_background(session)
    assert os.getpriority(os.PRIO_PROCESS, session) == before


def test_a_session_that_is_gone_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "_may_raise", lambda: True)
    background.to_background(2**22 + 1)  # beyond the kernel's largest
    assert "stays as it is: [Errno 3]" in caplog.text
