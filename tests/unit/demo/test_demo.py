"""The demo's files, its commands and what it reads of the run; `make demo` runs all of it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.cli import cli
from insitu.config.load import load_config
from insitu.demo import demo as module
from insitu.demo.commands import Commands, as_typed
from insitu.demo.demo import Demo, check_installed, write_project
from insitu.demo.figures import read_answers, read_figures
from insitu.errors import Conflict, InsituError, InvalidRequest
from insitu.harness.interfaces.settings import AdapterConfig
from insitu.system.processes import end_child, spawn

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "addition"
FILES = ["agent.py", "reward.py", "data/train.json", "data/validation.json"]
COMMANDS = Commands(Path("/models/small one"), Path("/tmp/demo"), 7001, 7002)


def test_the_project_is_the_example_that_the_end_to_end_test_trains(tmp_path: Path) -> None:
    write_project(tmp_path / "demo")
    found = sorted(str(path.relative_to(tmp_path / "demo")) for path in (tmp_path / "demo").rglob("*.*"))
    assert found == sorted([*FILES, "config.yml"])
    for name in FILES:
        assert (tmp_path / "demo" / name).read_bytes() == (EXAMPLE / name).read_bytes(), name


def test_held_out_questions_are_not_trained_on(tmp_path: Path) -> None:
    write_project(tmp_path)
    train, held_out = [
        {row["question"] for row in json.loads((tmp_path / "data" / f"{name}.json").read_text())}
        for name in ("train", "validation")
    ]
    assert train
    assert held_out
    assert not train & held_out


def test_an_earlier_demo_is_continued_and_anything_else_is_left_alone(tmp_path: Path) -> None:
    write_project(tmp_path / "demo")
    (tmp_path / "demo" / "agent.py").write_text("# mine")
    write_project(tmp_path / "demo")
    assert (tmp_path / "demo" / "agent.py").read_text() == "# mine"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(Conflict, match="holds something other"):
        write_project(other)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_the_commands_are_those_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(as_typed(COMMANDS.finetune([("finetuning.num_epochs", "2")])))
    command = cli.get_command(None, words[1])  # pyright: ignore[reportArgumentType]
    assert command is not None
    given = command.make_context(words[1], words[2:]).params
    loaded = load_config(given["config_file"], given["override"])
    assert loaded.config.finetuning.num_epochs == 2
    adapter = loaded.config.trainer_adapters["backend"]
    assert isinstance(adapter, AdapterConfig)
    assert (adapter.backend.port, adapter.backend.name) == (7001, "adder")
    assert loaded.config.llms["policy"].base_url == "http://127.0.0.1:7002/v1"
    served = shlex.split(as_typed(COMMANDS.serve))
    command = cli.get_command(None, served[1])  # pyright: ignore[reportArgumentType]
    assert command is not None
    params = command.make_context(served[1], served[2:]).params
    assert params["model"] == "/models/small one"
    assert (params["port"], params["gateway_port"]) == (7001, 7002)


def history(**again: object) -> list[dict[str, object]]:
    start = {"epoch": 0, "step": 0, "avg_reward": 0.1, "standard_error": 0.01}
    best = {"epoch": 12, "step": 11, "avg_reward": 0.75, "standard_error": 0.02, "remeasured": True}
    return [start, {**best, "gain": {"low": 0.6, "high": 0.7, "confidence": 0.9667}, **again}]


def test_figures_and_answers_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "validation_history.json").write_text(json.dumps(history()))
    figures = read_figures(tmp_path, 200.0)
    assert (figures.before, figures.after, figures.low, figures.high, figures.step) == (
        0.1,
        0.75,
        0.6,
        0.7,
        11,
    )
    assert "0.100 ± 0.010 before, 0.750 ± 0.020 after 11 updates (+0.650" in figures.sentence()
    assert "96.67 % interval +0.600 to +0.700" in figures.sentence()
    folder = tmp_path / "trajectories"
    folder.mkdir()
    for name, said in (("validation-0000", ["Sure!\nI can", "9"]), ("remeasured-000011", ["5", "6"])):
        lines = [json.dumps({"input": "2 + 3?", "output": each}) for each in said]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (answers,) = read_answers(tmp_path, 11)
    assert (answers.question, answers.before, answers.after) == ("2 + 3?", "Sure! I can", "5")


def test_a_run_without_an_interval_has_no_figures(tmp_path: Path) -> None:
    (tmp_path / "validation_history.json").write_text(json.dumps(history(gain=None)))
    with pytest.raises(InsituError, match="no gain with an interval"):
        read_figures(tmp_path, 1.0)


def test_a_backend_that_ends_is_shown_with_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    backend = spawn([sys.executable, "-c", "import sys; sys.exit('no room for the model')"], log)
    said: list[str] = []
    try:
        with pytest.raises(InsituError, match=r"(?s)ended with exit code 1.*no room for the model"):
            Demo(tmp_path, said.append, sys.stdout)._until_ready(backend, 9)  # pyright: ignore[reportPrivateUsage]
    finally:
        end_child(backend, 5)


def test_a_training_that_fails_names_the_next_command(tmp_path: Path) -> None:
    with pytest.raises(InsituError, match=rf"(?s)exit code 3.*insitu demo --dir {tmp_path}"):
        Demo(tmp_path, print, sys.__stdout__ or sys.stdout)._train(  # pyright: ignore[reportPrivateUsage]
            [sys.executable, "-c", "raise SystemExit(3)"]
        )


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, also if this process was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interruption_stops_the_training_with_one_signal(tmp_path: Path) -> None:
    script = (
        "import os, signal, time\n"
        "def stop(*_):\n"
        "    open('signals', 'a').write('x')\n"
        "    time.sleep(0.3)\n"
        "    raise SystemExit(130)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        Demo(tmp_path, print, sys.__stdout__ or sys.stdout)._train([sys.executable, "-c", script])  # pyright: ignore[reportPrivateUsage]
    assert (tmp_path / "signals").read_text() == "x"


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in ("vllm", "ray") else object())
    with pytest.raises(InvalidRequest, match=r"(?s)needs vllm, ray.*whl/cpu 'insitu\[backend-cpu\]'$"):
        check_installed()


def test_json_leaves_standard_output_to_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(demo: Demo) -> object:
        demo.say("a line for people")
        subprocess.run([sys.executable, "-c", "print('training')"], check=True, stdout=sys.__stderr__)
        (tmp_path / "validation_history.json").write_text(json.dumps(history()))
        return read_figures(tmp_path, 12.0)

    monkeypatch.setattr(Demo, "run", run)
    result = CliRunner().invoke(cli, ["demo", "--dir", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["after"] == 0.75
    assert "a line for people" in result.stderr


def test_what_a_starting_backend_does_is_told(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    assert module._phase(log) is None
    log.write_text("   0 s  starting Ray\n  12 s  starting Ray: done in 10 s\ncompute  cpu: float32\n")
    assert module._phase(log) == "starting Ray"
    log.write_text("  13 s  waiting for the engine\n  44 s  still waiting for the engine, 31 s: a seed\n")
    assert module._phase(log) == "waiting for the engine, 31 s"
