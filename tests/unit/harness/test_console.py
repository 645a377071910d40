"""What a run shows: figures, plain lines, the live display, and streams that go away."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from insitu.harness.interfaces.progress import Progress
from insitu.harness.screen import console
from insitu.harness.screen.console import open_progress
from insitu.harness.screen.figures import Figures
from insitu.harness.screen.live_screen import display
from insitu.harness.screen.plain_screen import PlainScreen
from insitu.harness.screen.safe_output import SafeOutput, print_lines, printable
from insitu.harness.screen.wording import duration
from insitu.types import Ending


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _end(progress: Progress, reward: float | None = 0.5, ending: Ending = Ending.COMPLETED) -> None:
    progress.rollout_started()
    progress.rollout_ended(ending, reward, num_output_tokens=100, seconds=1.0)


def test_figures_count_rewards_and_failures(clock: Clock) -> None:
    figures = Figures(clock)
    figures.phase_started("epoch 1/2", 10, done=2)
    for reward, ending in [(1.0, Ending.COMPLETED), (0.0, Ending.LENGTH), (None, Ending.TIMEOUT)]:
        _end(figures, reward, ending)
    figures.rollout_started()
    clock.now += 6
    phase = figures.snapshot().phase
    assert phase is not None
    assert (phase.done, phase.kept, phase.running, phase.num_failed) == (5, 2, 1, 1)
    assert phase.reward == 0.5
    # They took a second each, one at a time, and five are left; what was kept says nothing about speed.
    assert phase.seconds_left == pytest.approx(5.0)
    assert phase.tokens_per_second == pytest.approx(50.0)


def test_tokens_per_second_forget_what_is_long_ago(clock: Clock) -> None:
    figures = Figures(clock)
    figures.phase_started("epoch 1/1", 1000)
    for _ in range(30):
        clock.now += 1
        _end(figures)
    steady = figures.snapshot().phase
    clock.now += 30
    idle = figures.snapshot().phase
    assert steady is not None
    assert idle is not None
    assert steady.tokens_per_second == pytest.approx(100.0, rel=0.11)
    assert idle.tokens_per_second == 0.0


def test_time_left_of_the_run_comes_from_finished_epochs(clock: Clock) -> None:
    figures = Figures(clock)
    assert figures.snapshot().run is None
    figures.epoch_ended(4, 10, 0.5, "", seconds=100.0)
    figures.epoch_ended(5, 10, 0.5, "", seconds=200.0)
    clock.now += 50
    run = figures.snapshot().run
    assert run is not None
    # The first epoch of a process may contain a warm-up; the ones after it say how long one takes.
    assert run.seconds_left == pytest.approx(5 * 200.0 - 50)


def test_a_slow_start_does_not_spoil_the_estimate(clock: Clock) -> None:
    figures = Figures(clock)
    figures.phase_started("epoch 1/1", 1000)
    for seconds in (60.0, *[3.0] * 9):  # ten at a time; the first wave waits for a warm-up
        for _ in range(10):
            figures.rollout_started()
        clock.now += seconds
        for _ in range(10):
            figures.rollout_ended(Ending.COMPLETED, 1.0, 12, seconds)
    phase = figures.snapshot().phase
    assert phase is not None
    assert phase.seconds_left == pytest.approx(900 / 10 * 3.0)


def test_the_first_rollout_of_a_slow_start_promises_no_hours(clock: Clock) -> None:
    figures = Figures(clock)
    figures.phase_started("epoch 1/1", 128)
    for _ in range(128):
        figures.rollout_started()
    clock.now += 54
    figures.rollout_ended(Ending.COMPLETED, 1.0, 12, seconds=54.0)
    phase = figures.snapshot().phase
    assert phase is not None
    assert phase.seconds_left is not None
    assert phase.seconds_left <= 54.0


def test_durations_read_well() -> None:
    said = [duration(s) for s in (0.2, 40, 60, 125, 47 * 60, 3 * 3600 + 1200, 7200)]
    assert said == ["1 s", "40 s", "1 min", "2 min 5 s", "47 min", "3 h 20 min", "2 h"]


def test_printable_escapes_what_steers_a_terminal() -> None:
    assert printable("a\x1b[31mb\x07\t\u202e\ud800") == "a\\x1b[31mb\\x07\\t\\u202e\\ud800"
    assert printable("first\r\nINFO - forged\n") == "first\n    INFO - forged"
    assert printable("größer → 木 👍🏽") == "größer → 木 👍🏽"
    assert len(printable("x" * 1_000_000)) < 5000


def test_plain_lines_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with path.open("w") as out, open_progress(out) as progress:
        progress.info("Starting epoch 1 for run run_a1b2c3d4")
        progress.warn("tool said [bold]no[/bold] \x1b[2J")
        progress.phase_started("epoch 1/2", 4, done=1)
        for reward in (1.0, 0.0):
            _end(progress, reward)
        _end(progress, None, Ending.TIMEOUT)
        progress.phase_ended()
        progress.training("train", 0.5)
        progress.training_ended()
        progress.epoch_ended(1, 2, 0.5, "trained 2/4 trajectories: 1 failed", seconds=40.0)
    assert path.read_text().splitlines() == [
        "INFO - Starting epoch 1 for run run_a1b2c3d4",
        "WARNING - tool said [bold]no[/bold] \\x1b[2J",
        "INFO - epoch 1/2: 4/4 rollouts in 1 s (1 kept from an earlier start), 1 failed (1 timeout)"
        ", reward 0.500, 300 tokens/s",
        "INFO - Epoch 1/2 took 40 s - avg reward 0.5000 - trained 2/4 trajectories: 1 failed"
        " - about 40 s left",
    ]


def test_a_step_of_several_in_an_epoch_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with path.open("w") as out, open_progress(out) as progress:
        progress.phase_started("epoch 1/2, step 5/63", 4, brief=True)
        for reward in (1.0, 0.0, 1.0, 0.0):
            _end(progress, reward)
        progress.phase_ended()
        progress.training("train", 0.5)
        progress.training_ended()
        progress.step_ended("Epoch 1/2, step 5 (update 4)", 0.5, "trained 4/4", seconds=12.0, share=0.079)
        progress.verdict("learning: mean reward 0.5", warning=False)
        progress.verdict("not learning yet. Half of it \x1b[2J failed", warning=True)
        progress.phase_started("validation after step 5", 4)
        progress.phase_ended()
    assert path.read_text().splitlines() == [
        "INFO - Epoch 1/2, step 5 (update 4) took 12 s - avg reward 0.5000 - trained 4/4 - 8% of the epoch",
        "INFO - Verdict: learning: mean reward 0.5",
        "WARNING - Verdict: not learning yet. Half of it \\x1b[2J failed",
        "INFO - validation after step 5: 0/4 rollouts in 1 s",
    ]


def test_the_rest_of_an_epoch_is_estimated_from_its_latest_steps(clock: Clock) -> None:
    figures = Figures(clock)
    assert figures.epoch_seconds_left() is None
    for seconds, share in ((100.0, 0.1), (10.0, 0.2), (10.0, 0.3)):
        clock.now += seconds
        figures.step_ended("", None, "", seconds, share)
    assert figures.epoch_seconds_left() == pytest.approx(70.0)
    figures.step_ended("", None, "", 10.0, 0.1)
    assert figures.epoch_seconds_left() is None


def test_plain_progress_lines_are_rare(clock: Clock) -> None:
    out = io.StringIO()
    figures = Figures(clock)
    screen = PlainScreen(SafeOutput(out), clock)
    figures.phase_started("epoch 3/20", 128, done=0)
    for tick in range(4 * 30):
        clock.now += 0.25
        if tick % 2 == 0:
            _end(figures)
        screen.show([], figures.snapshot())
    said = out.getvalue().splitlines()
    assert len(said) in (2, 3)
    shape = r"INFO - epoch 3/20: \d+/128 rollouts, reward 0\.500, \d+ tokens/s, about [\dmins ]+ left"
    assert all(re.fullmatch(shape, line) for line in said)
    for _ in range(4 * 50):  # nothing changes: nothing to say
        clock.now += 0.25
        screen.show([], figures.snapshot())
    assert len(out.getvalue().splitlines()) <= len(said) + 1


def test_the_live_display_is_small_and_shows_it_all(clock: Clock) -> None:
    figures = Figures(clock)
    figures.epoch_ended(2, 20, 0.4, "", seconds=60.0)
    figures.phase_started("validation [red]", 128)
    for ending in (Ending.COMPLETED, Ending.TIMEOUT, Ending.TOOL_ERROR):
        _end(figures, 0.5 if ending is Ending.COMPLETED else None, ending)
    clock.now += 2
    figures.training("train", 0.45)
    figures.verdict("an older one", warning=True)
    figures.verdict(f"learning: mean reward \x1b[2J 0.5, {'rising ' * 20}", warning=False)
    for width in (120, 40, 80):
        out = io.StringIO()
        screen = Console(file=out, width=width, force_terminal=False)
        screen.print(display(figures.snapshot(), width))
        said = out.getvalue().splitlines()
        assert len(said) <= 8
        assert all(len(line) <= width for line in said)
    text = "\n".join(said)
    for part in (
        "validation [red]",
        "3/128 rollouts",
        "2 failed",
        "reward 0.500",
        "tokens/s",
        "45% train",
        "2/20 epochs",
        "left",
        "learning: mean reward \\x1b[2J 0.5, rising",
    ):
        assert part in text


def _read_all(descriptor: int, seconds: float = 0.2) -> str:
    text = b""
    while select.select([descriptor], [], [], seconds)[0]:
        try:
            text += os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
    return text.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, io.TextIOWrapper]]:
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        yield master, stream
    os.close(master)


def test_on_a_terminal_lines_scroll_above_a_display_that_goes_away(
    terminal: tuple[int, io.TextIOWrapper],
) -> None:
    master, stream = terminal
    with open_progress(stream) as progress:
        progress.phase_started("epoch 1/2", 4)
        _end(progress)
        progress.info("a line with [red]markup[/red] and \x1b[2J")
        time.sleep(0.6)
        progress.phase_ended()
    raw = _read_all(master)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)
    assert "INFO - a line with [red]markup[/red] and \\x1b[2J" in shown
    assert "1/4 rollouts" in shown
    assert "INFO - epoch 1/2: 1/4 rollouts in 1 s" in shown
    assert "\x1b[?25l" in raw  # the cursor is hidden
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")  # and comes back


def test_a_dumb_terminal_gets_plain_lines(
    terminal: tuple[int, io.TextIOWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, stream = terminal
    with open_progress(stream) as progress:
        progress.info("hello")
    assert _read_all(master) == "INFO - hello\r\n"


def test_a_narrow_encoding_is_no_error() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with open_progress(stream) as progress:
        progress.info("größer 木")
    assert raw.getvalue() == b"INFO - gr\\xf6\\xdfer \\u6728\n"


@pytest.mark.parametrize("on_terminal", [False, True])
def test_events_cost_next_to_nothing(
    terminal: tuple[int, io.TextIOWrapper], tmp_path: Path, *, on_terminal: bool
) -> None:
    master, stream = terminal
    with (tmp_path / "out").open("w") as out, open_progress(stream if on_terminal else out) as progress:
        started = time.perf_counter()
        progress.phase_started("epoch 1/1", 10_000)
        for _ in range(10_000):
            _end(progress)
        seconds = time.perf_counter() - started
        progress.phase_ended()
        _read_all(master, 0)
    assert seconds < 2.0  # 20,000 events


def test_a_reader_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_CLOSE_SECONDS", 0.2)
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    started = time.perf_counter()
    with open_progress(stream) as progress:
        for _ in range(12_000):
            progress.info("x" * 100)
    assert time.perf_counter() - started < 3.0
    text = ""
    while chunk := _read_all(reader, 0.5):  # the writer goes on once somebody reads
        text += chunk
    os.close(reader)
    stream.close()
    lost = re.search(r"WARNING - (\d+) lines could not be shown in time\n", text)
    assert text.count("INFO - ") + (int(lost[1]) if lost else 0) == 12_000


SCRIPT = """
import sys, time
from insitu.harness.screen.console import open_progress
from insitu.harness.screen.safe_output import print_lines
with open_progress() as progress:
    for _ in range(4):
        progress.info("hello")
        time.sleep(0.3)
print_lines(["the end"])
print("said last")
sys.exit(3)
"""


def test_a_closed_pipe_ends_the_output_not_the_run() -> None:
    run = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stderr is not None
    assert run.stdout.readline() == b"INFO - hello\n"
    run.stdout.close()
    errors = run.stderr.read().decode()
    run.stderr.close()
    assert run.wait(timeout=30) == 3
    assert errors == "WARNING - no more output can be shown ([Errno 32] Broken pipe); the run continues\n"


def test_no_standard_output_at_all() -> None:
    run = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, SCRIPT], stderr=subprocess.PIPE, timeout=30
    )
    assert (run.returncode, run.stderr) == (3, b"")


def test_print_lines_to_a_closed_stream(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    print_lines(["lost"], stream)
    assert "no more output can be shown" in capfd.readouterr().err


def test_a_failing_run_leaves_the_terminal_in_order(terminal: tuple[int, io.TextIOWrapper]) -> None:
    master, stream = terminal
    before = sys.stdout

    def run() -> None:
        with open_progress(stream) as progress:
            progress.warn("the last words")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    raw = _read_all(master)
    assert "the last words" in raw
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    assert sys.stdout is before
