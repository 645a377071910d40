"""Run pytest in two lanes at once: while a test waits for an engine, the other lane has a core.

    python -m tests.support.lanes tests/integration tests/faults -v

Both lanes collect the same tests and share them out as they go: a lane claims a group, runs it to its end,
and claims the next. A group is a file, or all tests that share an engine or a backend. Files of short tests
come first, then the others, those that may take longest before the rest. Tests marked `alone` measure time:
the lane that ends last runs them after all others.

The machine may be slow, or busy with another guest of its host:

- Limits of time are doubled, and what tests write lies in memory where it can.
- Up to a hundred tests that failed are run again, at most twice, with no other lane beside them: one test may
  leave something behind that fails those after it. One that passes then is named as unsteady on the last
  lines, with the reason of its failure; one that never passes fails the run. More than a hundred, or ten
  that fail again, are no bad luck: nothing more is run.
- A file that leaves something behind in its lane, such as a patch that was not undone, fails with its last
  test, and what it left is undone before the next file.
- INSITU_UNTIL, in seconds since the epoch, is when to begin no further test. Tests that are left out are
  counted in the summary, and their files are named on the last lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.left_behind import LeftBehind

NUM_LANES = 2
SHARED = ("vllm_tiny", "real_backend")
"""Fixtures that one lane starts for all tests that need them."""
ALONE = "alone"
MOST_UNSTEADY = 100
MOST_AGAIN = 10
MORE_RUNS = 2
_FAILED = "failed tests"
_LEFT_OUT = "tests left out"
_UNTIL = float(os.environ.get("INSITU_UNTIL") or "inf")
_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 4 * 2**30
_SHORT_SECONDS = 240
"""The doubled limit up to which a test counts as short."""
_REASON_CHARS = 200
_GRACE_SECONDS = 60
_SHOW_SECONDS = 5
_SHOWN_REASONS = 12
_TESTS_FAILED = 1
_NOTHING_SELECTED = 5
_SUMMARY = re.compile(r"^=* *((?:\d+ [a-z]+,? )+)in [\d.]+s.*$")
"""The last line of a lane, such as ``=== 3 passed, 1 skipped in 12.34s ===``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", type=int, help="number of this lane")
    parser.addoption("--claims", type=Path, help="directory in which the lanes claim their groups")
    parser.addoption("--only", type=Path, help="file of the tests to run, as the lanes note them")


def group_of(item: pytest.Item) -> str:
    """The name of the group that a test is run with."""
    if item.get_closest_marker(ALONE):
        return ALONE
    names: list[str] = getattr(item, "fixturenames", [])
    return next((name for name in SHARED if name in names), item.path.name)


def grouped(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The tests by group: first those of short tests, then the others, the longest first."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    longest = {name: max(map(_most_seconds, tests)) for name, tests in groups.items()}
    ordered = sorted(groups, key=lambda name: (longest[name] > _SHORT_SECONDS, -longest[name]))
    return {name: groups[name] for name in ordered}


def _most_seconds(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else 0.0


def claim(claims: Path, name: str) -> bool:
    """Return True for the first lane that asks."""
    with contextlib.suppress(FileExistsError):
        (claims / name).touch(exist_ok=False)
        return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the groups that this lane is the first to claim; a group's fixtures end with it."""
    claims: Path | None = session.config.getoption("claims")
    if (
        claims is None
        or session.config.getoption("only")
        or session.config.option.collectonly
        or session.testsfailed
    ):
        return None  # pytest's own loop reports errors of collection
    groups = grouped(session.items)
    alone = groups.pop(ALONE, [])
    left_behind = LeftBehind()
    for name, items in groups.items():
        if claim(claims, name):
            _run(session, items)
            if left := left_behind.undo():
                session.testsfailed += 1
                _note(claims / _FAILED, [items[-1].nodeid], f"its file left behind {'; '.join(left)}")
    (claims / f"lane {session.config.getoption('lane')} is done").touch()
    if len(list(claims.glob("lane * is done"))) == NUM_LANES and claim(claims, ALONE):
        _run(session, alone)
    return True


class _Noting:
    """Notes tests that failed, where `main` finds them."""

    def __init__(self, failures: Path) -> None:
        self._failures = failures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            _note(self._failures, [report.nodeid], f"{report.when}: {_reason(report)}")


def _reason(report: pytest.TestReport) -> str:
    """The message of a failure, on one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = " ".join((crash.message if crash else report.longreprtext).split())
    return message if len(message) <= _REASON_CHARS else f"{message[:_REASON_CHARS]}…"


def _note(file: Path, names: Sequence[str], reason: str) -> None:
    with file.open("a") as lines:
        lines.writelines(json.dumps([name, reason]) + "\n" for name in names)


def pytest_configure(config: pytest.Config) -> None:
    claims: Path | None = config.getoption("claims")
    if claims is not None:
        config.pluginmanager.register(_Noting(claims / _FAILED))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only: Path | None = config.getoption("only")
    if only is not None:
        names = noted(only)
        items[:] = [item for item in items if item.nodeid in names]
    if config.getoption("claims") is not None and config.pluginmanager.has_plugin("timeout"):
        usual = float(config.getini("timeout") or 0)
        for item in items:
            item.add_marker(pytest.mark.timeout(2 * (_most_seconds(item) or usual)), append=False)


def _run(session: pytest.Session, items: list[pytest.Item]) -> None:
    for number, item in enumerate(items, 1):
        if time.time() > _UNTIL:
            left = [each.nodeid for each in items[number - 1 :]]
            _note(session.config.getoption("claims") / _LEFT_OUT, left, "no time")
            return
        following = items[number] if number < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def main(arguments: list[str]) -> int:
    # Both lanes would write what failed last.
    command = [sys.executable, "-m", "pytest", "-p", __spec__.name, "-p", "no:cacheprovider", *arguments]
    started = time.monotonic()
    counts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="lanes-", dir=_fast_directory()) as directory:
        lanes = [
            [*command, f"--lane={number}", f"--claims={directory}", f"--basetemp={directory}/{number}"]
            for number in range(1, NUM_LANES + 1)
        ]
        codes = [code for code in _run_all(lanes, counts) if code != _NOTHING_SELECTED]
        result = max(map(abs, codes), default=_NOTHING_SELECTED)
        failed = noted(Path(directory) / _FAILED)
        left_out = noted(Path(directory) / _LEFT_OUT)
        left = list(failed)
        tries = MORE_RUNS if result == _TESTS_FAILED and len(failed) <= MOST_UNSTEADY else 0
        for again in range(tries):
            if left and (again == 0 or len(left) < MOST_AGAIN):
                left = _run_alone(command, Path(directory) / f"again{again}", left)
    if left_out:
        counts["left out"] = len(left_out)
    total = ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "no tests ran"
    print(f"{f' {total} in {time.monotonic() - started:.2f}s ':=^100}", flush=True)
    for name in failed:
        print(f"{'FAILED' if name in left else 'UNSTEADY, passed alone:'} {name}", flush=True)
    # Short, and last: the names above may be all that is kept of a long run.
    for reason, count in Counter(failed.values()).most_common(_SHOWN_REASONS):
        print(f"{count} × {reason}", flush=True)
    for file, count in Counter(name.partition("::")[0] for name in left_out).items():
        print(f"LEFT OUT, no time: {count} of {file}", flush=True)
    return 0 if result == _TESTS_FAILED and not left else result


def _fast_directory() -> Path | None:
    """A directory in memory, if the machine has one with space; None: where temporary files usually lie."""
    roomy = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES
    return _MEMORY if roomy else None


def _run_alone(command: list[str], directory: Path, names: list[str]) -> list[str]:
    """Run some tests again, one after another; return those that fail, or all if pytest itself does."""
    print(f"once more, alone: {', '.join(names)}", flush=True)
    directory.mkdir()
    only = directory / "only"
    _note(only, names, "")
    options = [f"--only={only}", f"--claims={directory}", f"--basetemp={directory}/files"]
    options.append(f"--maxfail={MOST_AGAIN}")
    codes = _run_all([[*command, *options]], Counter())
    again = list(noted(directory / _FAILED))
    return names if codes not in ([0], [_TESTS_FAILED]) or len(again) >= MOST_AGAIN else again


def noted(file: Path) -> dict[str, str]:
    """The tests that were noted and why, each once: one that fails may fail again as it is torn down."""
    lines = file.read_text().splitlines() if file.exists() else []
    found: dict[str, str] = {}
    for line in lines:
        name, reason = json.loads(line)
        found.setdefault(name, reason)
    return found


def _run_all(commands: list[list[str]], counts: Counter[str]) -> list[int]:
    """Run commands at once, each a lane, to their ends; return their exit codes."""
    lanes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        for command in commands
    ]
    try:
        shown = [
            threading.Thread(target=_show, args=(number, lane, counts), daemon=True)
            for number, lane in enumerate(lanes, 1)
        ]
        for thread in shown:
            thread.start()
        codes = [lane.wait() for lane in lanes]  # every test has a time limit of its own
        for thread in shown:
            thread.join(_SHOW_SECONDS)  # a process that a test left behind may keep the pipe open
    finally:
        for lane in lanes:
            _end(lane)
    return codes


def _show(number: int, lane: subprocess.Popen[str], counts: Counter[str]) -> None:
    """Print what a lane prints, and add up what its summary counts."""
    assert lane.stdout is not None
    for line in lane.stdout:
        print(f"{number}| {line}", end="", flush=True)
        if found := _SUMMARY.match(line):
            for part in found[1].strip().split(", "):
                count, what = part.split(" ", 1)
                counts[what] += int(count)


def _end(lane: subprocess.Popen[str]) -> None:
    """Let an interrupted lane stop its engines."""
    if lane.poll() is None:
        lane.send_signal(signal.SIGINT)
        try:
            lane.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            lane.kill()
            lane.wait(_GRACE_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
