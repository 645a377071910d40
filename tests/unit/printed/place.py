"""Place: a user's directory beside a stand-in backend, where commands are run and followed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shlex
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.api.settings import ApiSettings
from insitu.backend.ledger import checkpoint_files
from insitu.cli import main
from insitu.client import InsituClient
from insitu.errors import InsituError
from tests.support.finetuning import Project
from tests.support.peft_directory import write_peft
from tests.support.standin_backend import KEY, StandinBackend

RUN = "small"
SMALL_MODEL: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
_VALUE = r"(?:'[^']*'|[^\s`;,)]+)"
_SECONDS = 30


class WholeBackend(StandinBackend):
    """A stand-in backend whose checkpoints hold an adapter as PEFT writes it."""

    publication = "adapter"

    def _checkpoint(self, run: str, step: int) -> tuple[Path, str]:
        staging = checkpoint_files.stage(self._runs_dir, run, step)
        write_peft(staging / "adapter", base_model_name_or_path="tiny")
        digest = checkpoint_files.commit(staging)
        run_dir = checkpoint_files.run_directory(self._runs_dir, run)
        return checkpoint_files.checkpoint_path(run_dir, step), digest

    @asynccontextmanager
    async def _api(self, settings: ApiSettings) -> AsyncIterator[None]:
        async with super()._api(replace(settings, publication=self.publication)):
            yield


@contextmanager
def in_a_thread(backend: StandinBackend) -> Iterator[asyncio.AbstractEventLoop]:
    """Serve from a thread: the commands under test have loops of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(backend.__aenter__(), loop).result(_SECONDS)
        try:
            yield loop
        finally:
            asyncio.run_coroutine_threadsafe(backend.__aexit__(), loop).result(_SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a user sits."""

    path: Path
    backend: WholeBackend
    project: Project
    monkeypatch: pytest.MonkeyPatch

    @property
    def url(self) -> tuple[str, str]:
        """The option by which commands reach the backend."""
        return "--url", self.backend.api_url

    def run(self, *words: str) -> tuple[int, str]:
        """Run a command in this process, as a shell does; return the exit code and all output."""
        for name in ("small_agent", "agent", "reward"):
            sys.modules.pop(name, None)
        self.monkeypatch.setattr(sys, "argv", ["insitu", *words])
        said, code = io.StringIO(), 0
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return code, said.getvalue()

    def passed(self, *words: str) -> str:
        """Run a command that must succeed."""
        code, said = self.run(*words)
        assert code == 0, f"insitu {shlex.join(words)}: exit {code}\n{said}"
        return said

    def rejected(self, *words: str) -> str:
        """Run a command that must fail, and return its message."""
        code, said = self.run(*words)
        assert code != 0, said
        return said

    def asked(self, question: Callable[[InsituClient], Awaitable[Any]]) -> str:
        """Ask the API something that it must reject, and return the hint as a client sees it."""

        async def answer() -> None:
            async with self.backend.client() as client:
                await question(client)

        with pytest.raises(InsituError) as caught:
            asyncio.run(answer())
        return caught.value.hint

    def told(self, said: str, template: str, **values: str) -> list[str]:
        """Return the words of the command in `said`, with values for the words that the user must replace."""
        pieces = re.split(r"…|\{\w+\}", template)
        pattern = rf"insitu {_VALUE.join(map(re.escape, pieces))}( --(?:url|state-dir) {_VALUE})*"
        found = re.search(pattern, said)
        assert found, f"{template!r} is not in:\n{said}"
        words = shlex.split(found[0])[1:]
        for name, value in values.items():
            assert any(name in word for word in words), name
            words = [word.replace(name, value) for word in words]
        return words

    def followed(self, said: str, template: str, *reaching: str, **values: str) -> str:
        """Run the command that `said` names; `reaching` is for hints of the API, which have no --url."""
        return self.passed(*self.told(said, template, **values), *reaching)

    def trained(self, **changes: Any) -> str:
        """Train the run, two updates."""
        self.project.configure(**changes)
        return self.passed("finetune", "--config_file=config.yml")

    def model(self, name: str) -> str:
        """Write a model's configuration, all that `insitu serve` reads before it starts processes."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SMALL_MODEL))
        return name

    def served(self, words: list[str]) -> Any:
        """Start `insitu serve` up to the point where it would start processes; return its settings."""
        assert words[0] == "serve"
        found: list[Any] = []
        self.monkeypatch.setattr("insitu.backend.serve.serve", lambda settings, *_: found.append(settings))
        self.passed(*words)
        (settings,) = found
        return settings


@contextmanager
def open_place(path: Path, monkeypatch: pytest.MonkeyPatch, publication: str = "adapter") -> Iterator[Place]:
    backend = WholeBackend(path / "state", train_seconds=0.01)
    backend.publication = publication
    monkeypatch.setattr("insitu.harness.loop.epoch_trainer._POLL_SECONDS", 0.02)
    monkeypatch.setitem(InsituClient.wait_run_ready.__kwdefaults__, "poll_seconds", 0.02)
    monkeypatch.setattr("insitu.harness.loop.epoch_trainer.write_plot", lambda *_: None)
    monkeypatch.setattr("insitu.wire.transport.RetryPolicy.pause", lambda *_: 0.0)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("INSITU_API_KEY", KEY)
    monkeypatch.setenv("INSITU_STATE_DIR", str(path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    before = set(sys.modules)
    with in_a_thread(backend):
        project = Project(path / "project", backend.port, backend.gateway_url, 3)
        monkeypatch.chdir(project.path)
        yield Place(project.path, backend, project, monkeypatch)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(path)):
            del sys.modules[name]
