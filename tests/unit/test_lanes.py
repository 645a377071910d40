"""tests/support/lanes.py: every test runs once, in one of two lanes; what measures time runs alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.lanes import MOST_AGAIN, MOST_UNSTEADY

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import os, time
from pathlib import Path
import pytest

LOG = Path(__file__).with_name("log")

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: with no other")

def note(text):
    with LOG.open("a") as log:
        log.write(f"{os.getpid()} {text}\\n")

@pytest.fixture(scope="session")
def vllm_tiny():
    note("start engine")
    yield
    note("stop engine")

@pytest.fixture(autouse=True)
def noted(request):
    note(f"begin {request.node.name}")
    time.sleep(0.1)
    yield
    note(f"end {request.node.name}")
"""
FILES = {
    "test_one.py": "def test_a(vllm_tiny): pass\ndef test_b(): pass\n",
    "test_two.py": "def test_c(vllm_tiny): pass\ndef test_d(): pass\n",
    "test_three.py": "import pytest\n@pytest.mark.alone\ndef test_e(): pass\ndef test_f(): pass\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"conftest.py": CONFTEST, **FILES}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def lanes(folder: Path, *arguments: str, until: float | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.lanes", "-c", "/dev/null", "--rootdir", str(folder)]
    options = ["--disable-plugin-autoload", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "INSITU_UNTIL"}
    if until is not None:
        environment["INSITU_UNTIL"] = str(until)
    return subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def noted(folder: Path) -> list[tuple[str, str]]:
    """Process and event, in the order of their time."""
    lines = (folder / "log").read_text().splitlines()
    return [(pid, text) for pid, _, text in (line.partition(" ") for line in lines)]


def test_every_test_runs_once_and_the_engine_starts_once(folder: Path) -> None:
    done = lanes(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    events = noted(folder)
    begun = [text for _, text in events if text.startswith("begin")]
    assert sorted(begun) == [f"begin test_{letter}" for letter in "abcdef"]
    assert len({pid for pid, _ in events}) == 2, "both lanes had something to do"
    assert re.fullmatch(r"=+ 6 passed in [\d.]+s =+", done.stdout.splitlines()[-1]), "one summary of both"
    shared = [text for pid, text in events if pid == dict(map(reversed, events))["start engine"]]
    first, last = shared.index("start engine"), shared.index("stop engine")
    assert [text for text in shared[first:last] if "begin" in text] == ["begin test_a", "begin test_c"]


def test_what_measures_time_begins_when_all_others_have_ended(folder: Path) -> None:
    assert lanes(folder).returncode == 0
    assert [text for _, text in noted(folder)][-2:] == ["begin test_e", "end test_e"]


def test_a_failure_in_one_lane_fails_the_whole(folder: Path) -> None:
    (folder / "test_two.py").write_text("def test_d(): assert False, 'seen'\n")
    done = lanes(folder)
    assert done.returncode == 1
    assert "seen" in done.stdout
    *_, name, reason = done.stdout.splitlines()
    assert name == "FAILED test_two.py::test_d", "said where it is read first"
    assert reason == "1 × call: AssertionError: seen assert False"


def test_a_test_that_passes_alone_is_named_and_does_not_fail_the_whole(folder: Path) -> None:
    once = "from pathlib import Path\ndef test_d():\n    mark = Path(__file__).with_name('mark')\n"
    (folder / "test_two.py").write_text(once + "    seen = mark.exists(); mark.touch(); assert seen\n")
    done = lanes(folder)
    assert done.returncode == 0, done.stdout
    *_, total, name, reason = done.stdout.splitlines()
    assert reason == "1 × call: assert False"
    assert "1 failed, 4 passed" in total
    assert name == "UNSTEADY, passed alone: test_two.py::test_d"
    assert sum(text == "begin test_a" for _, text in noted(folder)) == 1, "no other test ran twice"


@pytest.mark.parametrize(("number", "tries"), [(MOST_UNSTEADY, 2), (MOST_UNSTEADY + 1, 1)])
def test_many_failures_are_tried_once_more_and_very_many_are_not(
    folder: Path, number: int, tries: int
) -> None:
    (folder / "conftest.py").write_text(CONFTEST.replace("time.sleep(0.1)", ""))
    (folder / "test_two.py").write_text("".join(f"def test_x{n}(): assert False\n" for n in range(number)))
    done = lanes(folder)
    assert done.returncode == 1
    begun = [text for _, text in noted(folder) if text.startswith("begin test_x")]
    assert begun.count("begin test_x0") == tries
    assert len(begun) == number + (tries - 1) * MOST_AGAIN, "it stops where ten failed again"
    assert done.stdout.count("FAILED test_two.py::test_x") >= number, "none of them counts as passed"


LEAVES = """
import os, pytest

def test_c():
    pytest.MonkeyPatch().setattr(os, "getcwdb", None)
    os.chdir("/")

def test_d(): pass
"""
NEEDS = """
import os

def test_{}():
    os.getcwdb()
    assert os.getcwd() != "/"
"""


def test_a_file_that_leaves_something_behind_is_named_and_the_next_is_not_hurt(folder: Path) -> None:
    (folder / "test_two.py").write_text(LEAVES)
    for name in ("one", "three"):
        (folder / f"test_{name}.py").write_text(NEEDS.format(name))
    done = lanes(folder)
    *_, name, reason = done.stdout.splitlines()
    assert reason == "1 × its file left behind patches of os.getcwdb; the working directory /"
    assert name == "UNSTEADY, passed alone: test_two.py::test_d"
    assert done.returncode == 0, done.stdout
    assert "FAILED" not in done.stdout


def test_what_there_is_no_time_for_is_counted_and_named(folder: Path) -> None:
    done = lanes(folder, until=time.time() - 1)
    *_, total, one, two, three = done.stdout.splitlines()
    assert " 6 left out in " in total
    assert {one, two, three} == {f"LEFT OUT, no time: 2 of {name}" for name in FILES}
    assert not (folder / "log").exists(), "nothing was run"


def test_a_file_that_cannot_be_imported_fails_both_lanes(folder: Path) -> None:
    (folder / "test_two.py").write_text("import nothing_of_this_name\n")
    done = lanes(folder)
    assert done.returncode == 2
    assert "nothing_of_this_name" in done.stdout


def test_nothing_selected_is_said(folder: Path) -> None:
    assert lanes(folder, "-k", "absent").returncode == 5
