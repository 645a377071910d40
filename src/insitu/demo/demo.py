"""Demo: a model, a backend, training, and what it gained.

files in a folder ──► insitu serve ──► insitu finetune ──► held-out reward before and after
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import TextIO
from urllib.error import HTTPError

from insitu.demo.commands import CONFIG_FILE, RUN_NAME, Commands, as_typed
from insitu.demo.figures import Figures, read_answers, read_figures
from insitu.errors import Conflict, InsituError, InvalidRequest
from insitu.harness.screen.summary import ask_command
from insitu.system.processes import end_child, free_port, guarded, spawn, tail
from insitu.system.torch_builds.installing import install_command

_NEEDED = ("torch", "vllm", "ray", "peft", "gguf")
_LOG = "serve.log"
_OUTPUT = "output"
_READY_SECONDS = 600.0
_STOP_SECONDS = 60.0
_SAY_EVERY_SECONDS = 15.0

Say = Callable[[str], None]
Cli = (sys.executable, "-m", "insitu.cli")


@dataclass(frozen=True, slots=True)
class Demo:
    """A folder that holds everything of the demo but the model, which is cached."""

    folder: Path
    say: Say
    screen: TextIO
    """Receives the output of the training."""
    model: Path | None = None
    """The directory of a model to train; None: SmolLM2-135M-Instruct, downloaded at the first start."""

    def run(self) -> Figures:
        """Run all of it, stop the backend, and return what was gained."""
        began = time.monotonic()
        check_installed()
        write_project(self.folder)
        commands = Commands(self._model(), self.folder, free_port(), free_port())
        self.say(f"[2/3] Backend, with its log in {self.folder / _LOG}:\n      {as_typed(commands.serve)}")
        backend = spawn([*Cli, *commands.serve], self.folder / _LOG)
        try:
            self._until_ready(backend, commands.port)
            training = commands.finetune()
            self.say(f"[3/3] Training, in {self.folder}:\n      {as_typed(training)}")
            self._train([*Cli, *training, "--no-next-commands"])
        finally:
            self.say("      stopping the backend")
            end_child(backend, _STOP_SECONDS)
        figures = read_figures(self.folder / _OUTPUT, time.monotonic() - began)
        self._tell(figures, commands)
        return figures

    def _model(self) -> Path:
        """Return the directory of the model; the first demo on a machine downloads it."""
        if self.model is not None:
            self.say(f"[1/3] Model: {self.model}")
            return self.model
        self.say("[1/3] Model: SmolLM2-135M-Instruct; the first start downloads 96 MB and converts them.")
        return fetch_model()

    def _until_ready(self, backend: subprocess.Popen[bytes], port: int) -> None:
        """Wait for the backend, and say from time to time what it waits for."""
        began = said = time.monotonic()
        while (cause := _not_ready(f"http://127.0.0.1:{port}/ready")) is not None:
            now = time.monotonic()
            if backend.poll() is not None:
                raise self._broken(f"ended with exit code {backend.returncode}")
            if now - began > _READY_SECONDS:
                raise self._broken(f"was not ready after {_READY_SECONDS:.0f} s: {cause}")
            if now - said > _SAY_EVERY_SECONDS:
                said = now
                self.say(f"      {now - began:3.0f} s: {_phase(self.folder / _LOG) or cause}")
            time.sleep(0.5)
        self.say(f"      ready after {time.monotonic() - began:.0f} s")

    def _broken(self, what: str) -> InsituError:
        log = self.folder / _LOG
        return InsituError(f"the backend {what}; the last lines of {log}:\n{tail(log)}")

    def _train(self, command: Sequence[str]) -> None:
        # In a session of its own: a Ctrl-C comes here alone, and is passed on once.
        training = subprocess.Popen(
            guarded(command), cwd=self.folder, stdout=self.screen, start_new_session=True
        )
        try:
            code = training.wait()
        finally:
            end_child(training, _STOP_SECONDS)
        if code:
            raise InsituError(
                f"the training ended with exit code {code}; its reason is above",
                hint=f"continue with the same command: insitu demo --dir {shlex.quote(str(self.folder))}",
            )

    def _tell(self, figures: Figures, commands: Commands) -> None:
        """Say what was gained, what is left on the disk, and what to do next."""
        self.say(f"\n{figures.sentence()}\n")
        for answers in read_answers(self.folder / _OUTPUT, figures.step):
            self.say(f"  {answers.question}\n    before: {answers.before}\n    after:  {answers.after}")
        self.say(f"\nEverything is in {self.folder}; the model is in {commands.model}.")
        self.say(
            "The backend is stopped. Look at the run in a browser, or at single rollouts with every token:"
        )
        output = shlex.quote(str(self.folder / _OUTPUT))
        self.say(f"  insitu view {output}\n  insitu trajectories list {output}")
        self.say("Serve the trained model again:")
        self.say(f"  {as_typed(commands.serve)}")
        self.say("When that says `ready`, ask it from a second terminal:")
        question = "What is 3 + 5? Reply with the number only."
        self.say(f"  {ask_command(f'http://127.0.0.1:{commands.gateway_port}', RUN_NAME, question)}")
        self.say("Start a project with an agent, a reward and data of your own:")
        self.say("  insitu init my-agent")


def check_installed() -> None:
    """Raise InvalidRequest if the backend's packages are missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidRequest(
            f"the demo trains on this machine and needs {', '.join(missing)}",
            hint=install_command("insitu[backend-cpu]"),
        )


def fetch_model() -> Path:
    """Return the model's directory; the first call downloads it."""
    from insitu.testing.models import smollm2

    return smollm2()


def write_project(folder: Path) -> None:
    """Copy the demo's files; an earlier demo in the folder is continued."""
    with as_file(files("insitu.demo") / "project") as own:
        if (folder / CONFIG_FILE).exists():
            if (folder / CONFIG_FILE).read_bytes() == (own / CONFIG_FILE).read_bytes():
                return
        elif not folder.exists() or not any(folder.iterdir()):
            copytree(own, folder, dirs_exist_ok=True, ignore=ignore_patterns("__*"))
            return
    raise Conflict(
        f"{folder} holds something other than this demo",
        hint="choose another folder: insitu demo --dir NAME",
    )


def _phase(log: Path) -> str | None:
    """Return what a starting backend has said last that it does; None if it has said nothing yet."""
    for line in reversed(tail(log).splitlines()):
        elapsed, _, text = line.strip().partition(" s  ")
        if elapsed.isdigit() and ": done in " not in text:
            return text.removeprefix("still ").partition(":")[0]
    return None


def _not_ready(url: str) -> str | None:
    """Return why the backend is not ready; None if it is."""
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - our own loopback address
            return None
    except HTTPError as answer:
        return "; ".join(json.loads(answer.read())["causes"])
    except OSError:
        return "the backend starts"
