"""Logs neither fill the disk nor hide that something was left out."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from insitu.backend.plan.settings import Deadlines
from insitu.gateway.shared.settings import Limits
from insitu.system.logs import LOG_FILE, JsonLines, RateLimit


def record(line: int, text: str = "wrong %s") -> logging.LogRecord:
    return logging.LogRecord("x", logging.ERROR, "f.py", line, text, ("input",), None)


def test_a_logged_value_forges_no_line_and_steers_no_terminal() -> None:
    said = 'first\n{"level": "INFO"}\r\x1b[31m\u2028'
    logged = JsonLines().format(record(1, said + "%s"))
    assert logged.isascii()
    assert logged.isprintable()
    assert json.loads(logged)["message"] == said + "input"


def test_a_flood_from_one_place_is_thinned_out_and_counted() -> None:
    now = [0.0]
    limit = RateLimit(burst=10, per_minute=60, clock=lambda: now[0])
    assert sum(limit.filter(record(1)) for _ in range(1000)) == 10
    assert limit.filter(record(2)), "another place is not affected"
    now[0] = 1.5
    passed = record(1)
    assert limit.filter(passed)
    assert passed.getMessage() == "wrong input (990 records from here were omitted)"
    assert not limit.filter(record(1))


def test_the_file_behind_standard_error_is_cut_and_kept_once(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    program = (
        "import logging, insitu.system.logs as logs\n"
        "handler = logs.BoundedStream(max_bytes=10_000)\n"
        "for n in range(1000):\n"
        "    handler.emit(logging.LogRecord('x', 20, 'f', 1, f'line {n} ' + 'y' * 90, (), None))\n"
    )
    environment = {LOG_FILE: str(log), "PYTHONPATH": ":".join(sys.path)}
    with log.open("ab") as stderr:
        command = [sys.executable, "-c", program]
        subprocess.run(command, stderr=stderr, env=environment, check=True, timeout=60)
    assert log.stat().st_size <= 11_000
    assert (tmp_path / "part.log.1").stat().st_size <= 11_000
    assert log.read_text().splitlines()[-1].startswith("line 999 ") or not log.read_text()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_supervisor_waits_longer_than_its_children_drain() -> None:
    limits = Limits()
    assert Deadlines().stop_grace > limits.drain_seconds + limits.flush_seconds
