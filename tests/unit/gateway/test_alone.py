"""`insitu gateway` as a command of its own: what it records is for its owner alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.timeout(60)
def test_its_records_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = (sys.executable, "-m", "insitu.cli", "gateway", "--upstream", "http://127.0.0.1:9")
    running = subprocess.Popen(
        [*command, "--port", str(port), "--records", str(tmp_path / "calls.db")],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.umask(0o022) and None,
    )
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "calls.db").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.rglob("*") if file.is_file()}
        assert set(modes.values()) == {0o600}, modes
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(30)
