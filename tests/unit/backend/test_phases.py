"""What `insitu serve` prints while it starts and trains."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from insitu.backend.progress.engine_log import last_message
from insitu.backend.progress.phases import Phases
from insitu.backend.progress.step_line import step_line


@dataclass
class Screen:
    """Lines that were said, and a clock that only moves when told."""

    now: float = 100.0
    lines: list[str] = field(default_factory=list)

    def phases(self) -> Phases:
        return Phases(self.lines.append, lambda: self.now)


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_a_phase_is_announced_with_the_seconds_since_the_start(screen: Screen) -> None:
    phases = screen.phases()
    with phases.phase("checking the model m"):
        screen.now += 0.2
    with phases.phase("starting Ray"):
        screen.now += 4
    assert screen.lines == [
        "   0 s  checking the model m",
        "   0 s  starting Ray",
        "   4 s  starting Ray: done in 4 s",
    ]


def test_what_takes_long_is_repeated_with_what_is_known(screen: Screen) -> None:
    phases = screen.phases()
    with phases.phase("loading the trainer"), phases.phase("waiting for the engine", lambda: "loads weights"):
        for _ in range(16):
            screen.now += 1
            phases.beat()
    assert screen.lines[2:4] == [
        "  15 s  still loading the trainer, 15 s",
        "  15 s  still waiting for the engine, 15 s: loads weights",
    ]


def test_a_download_of_ten_minutes_is_not_repeated_forty_times(screen: Screen) -> None:
    phases = screen.phases()
    with phases.phase("checking the model m"):
        for _ in range(600):
            screen.now += 1
            phases.beat()
    assert len(screen.lines) == 1 + 7 + 8 + 1, "the start, 15 s to 105 s, 165 s to 585 s, the end"


def test_a_failed_phase_is_not_done_and_is_not_repeated(screen: Screen) -> None:
    phases = screen.phases()

    def fail() -> None:
        with phases.phase("starting Ray"):
            screen.now += 20
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    screen.now += 60
    phases.beat()
    assert screen.lines == ["   0 s  starting Ray"]


def test_lines_after_the_start_carry_the_time_of_day(screen: Screen) -> None:
    phases = screen.phases()
    phases.ready()
    with phases.phase("training run adder", lambda: "checkpoint", quiet=True):
        screen.now += 20
        phases.beat()
    (line,) = screen.lines
    clock, text = line.split("  ", 1)
    assert [len(part) for part in clock.split(":")] == [2, 2, 2]
    assert text == "still training run adder, 20 s: checkpoint"


def test_the_thread_repeats_while_the_work_blocks(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.backend.progress.phases._TICK_SECONDS", 0.01)
    repeated = threading.Event()

    def say(line: str) -> None:
        if "still" in line:
            repeated.set()

    with Phases(say, lambda: screen.now) as phases, phases.phase("starting Ray"):
        screen.now += 20
        assert repeated.wait(5)
    assert not phases._thread.is_alive()


def test_a_step_is_one_line_with_its_main_figures() -> None:
    figures = {
        "num_sequences": 128.0,
        "num_tokens": 9216.0,
        "reward/mean": 0.53125,
        "loss": -0.01234567,
        "entropy": 1.2,
        "kl/reference": 0.0,
        "mismatch/kl": 0.00043,
        "updated": 1.0,
        "time/step_seconds": 41.4,
    }
    assert step_line("adder", 3, figures) == (
        "run adder: step 3 published after 41 s: 128 sequences, 9,216 tokens, reward 0.5312, loss -0.01235, "
        "entropy 1.2, mismatch 0.00043"
    )
    unchanged = step_line("adder", 3, figures | {"updated": 0.0, "kl/reference": 0.02})
    assert "KL 0.02" in unchanged
    assert unchanged.endswith("weights unchanged")


def test_the_last_message_of_an_engine_s_log(tmp_path: Path) -> None:
    log = tmp_path / "replica-0.log"
    assert last_message(log) == str(log)
    log.write_text(json.dumps({"level": "INFO", "message": "Loading weights\n took 1.2 s"}) + "\n\n")
    assert last_message(log) == f"Loading weights took 1.2 s ({log})"
    log.write_text("x" * 300)
    assert last_message(log).startswith("x" * 100)
    assert len(last_message(log)) < 130 + len(str(log))
    log.write_text("[]\n")
    assert last_message(log) == f"[] ({log})"


class StandinEngine:
    """Answers at once."""

    url = "http://127.0.0.1:1"

    async def warm_up(self, *_: object) -> None:
        """Compile nothing."""

    async def set_version(self, _version: str) -> None:
        """Serve nothing."""


@pytest.fixture
async def started(screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("ray", reason="engines are Ray actors")
    from insitu.backend.fleet import replicas
    from insitu.backend.plan.settings import Deadlines

    async def described(*_: object) -> list[object]:
        return [SimpleNamespace(url="http://127.0.0.1:1", pid=7, devices="", is_home=True)]

    async def healthy(*_: object) -> None:
        screen.now += 30

    monkeypatch.setattr(replicas, "gather", described)
    monkeypatch.setattr(replicas, "wait_healthy", healthy)
    monkeypatch.setattr(replicas, "EngineClient", lambda *_: StandinEngine())
    nothing: Any = SimpleNamespace(call=lambda _name: None, max_num_seqs=64)
    made = replicas.ReplicaSet(nothing, tmp_path, tmp_path, Deadlines(), phases=screen.phases())
    return await made._when_ready("replica-0", nothing, nothing, in_background=False)


async def test_the_start_of_an_engine_says_its_phases(screen: Screen, started: Any) -> None:
    assert started.pid == 7
    assert screen.lines == [
        "   0 s  starting the engine replica-0 (vLLM)",
        "   0 s  waiting for the engine replica-0",
        "  30 s  waiting for the engine replica-0: done in 30 s",
        "  30 s  warming up replica-0 with 64 calls",
    ]
