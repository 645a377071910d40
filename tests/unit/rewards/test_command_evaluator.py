"""Rewards that are programs: what they get, what counts as a score, and the limits that end them."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.plugins import Kind
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_item

ITEM = EvalItem("e1", "2 + 3?", 5, "it is 5", {"level": "easy"})


@pytest.fixture
def scored(component, parts):
    """The result of a Python program as a reward."""

    async def run(program: str, **fields: Any) -> EvalResult:
        (Path(parts.directory) / "score.py").write_text(program)
        known, config = component(Kind.EVALUATOR, "command", command=[sys.executable, "score.py"], **fields)
        return await score_item(known.make(config, parts), ITEM, 120)

    return run


async def test_the_program_reads_the_rollout_and_writes_the_score(scored) -> None:
    program = (
        "import json, sys; item = json.load(sys.stdin); print(float(str(item['expected']) in item['output']))"
    )
    assert (await scored(program)).score == 1.0
    program = (
        "import json, sys; item = json.load(sys.stdin); print(json.dumps({'score': 0.5, 'reasoning': item}))"
    )
    result = await scored(program)
    assert result.score == 0.5
    assert result.reasoning == {
        "id": "e1",
        "input": "2 + 3?",
        "expected": 5,
        "output": "it is 5",
        "row": {"level": "easy"},
    }


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('good')", "wrote 'good'"),
        ("print('NaN')", "wrote 'NaN'"),
        ("print('{}')", "wrote"),
        ("pass", "wrote ''"),
        ("import sys; sys.exit('no\\x1b[31m idea')", r"exit code 1: no\\x1b\[31m idea"),
        ("print('1' * (2 << 20))", "wrote more than"),
    ],
)
async def test_anything_but_a_number_is_an_error(scored, program: str, said: str) -> None:
    result = await scored(program)
    assert result.score is None
    assert re.search(said, result.error), result.error


@pytest.mark.parametrize(
    ("program", "fields", "said"),
    [
        ("while True: pass", {"cpu_seconds": 1}, r"used more than cpu_seconds (1)"),
        ("x = bytearray(512 << 20); print(1)", {"max_memory_mib": 256}, "MemoryError"),
        (
            "files = [open('/dev/null') for _ in range(40)]; print(1)",
            {"max_open_files": 16},
            "Too many open files",
        ),
        (
            "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL); "
            "open('big', 'wb').write(bytes(3 << 20)); print(1)",
            {"max_file_mib": 1},
            "wrote a file of more than max_file_mib (1)",
        ),
        ("open('big', 'wb').write(bytes(3 << 20)); print(1)", {"max_file_mib": 1}, "File too large"),
    ],
)
async def test_every_limit_ends_the_program_and_is_named(
    scored, program: str, fields: Any, said: str
) -> None:
    result = await scored(program, **fields)
    assert result.score is None
    assert said in result.error
    assert (await scored(program.replace("while True: pass", "print(1)"))).score == 1.0, (
        "it fits the defaults"
    )


async def test_a_program_that_waits_is_ended_with_its_children(scored, parts) -> None:
    program = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL); "
        "open('pid', 'w').write(str(child.pid)); child.wait()"
    )
    began = time.monotonic()
    result = await scored(program, timeout_seconds=5)
    assert "longer than 5 s" in result.error
    assert time.monotonic() - began < 60
    pid = int((Path(parts.directory) / "pid").read_text())
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "Z (zombie)" in status.read_text()


async def test_keys_of_the_environment_are_not_passed_on(scored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_API_KEY", "secret")
    program = "import os; print(int('INSITU_API_KEY' not in os.environ and os.environ['MODE'] == 'strict'))"
    assert (await scored(program, env={"MODE": "strict"})).score == 1.0


def test_a_program_that_does_not_exist_is_refused_at_the_start(component, parts) -> None:
    for command in (["no-such-program"], ["./score"]):
        known, config = component(Kind.EVALUATOR, "command", command=command)
        with pytest.raises(InvalidRequest, match="is not a program"):
            known.make(config, parts)
