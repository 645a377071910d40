"""One small run of the stand-ins, made once; tests that change it take a copy."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.view.run import ViewedRun
from tests.support.viewed_run import make_run, write_tokenizer


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that nobody may change."""
    with pytest.MonkeyPatch.context() as patch:
        return asyncio.run(make_run(tmp_path_factory.mktemp("made"), patch, num_epochs=3))


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "runs" / "first"))


@pytest.fixture
def viewed(finished_run: Path, tmp_path: Path) -> Iterator[ViewedRun]:
    """The run, indexed to its end, with the text of its tokens."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    run = ViewedRun("run", finished_run, tokenizer=tokenizer, index=tmp_path / "index.db")
    while not run.index.refresh():
        pass
    yield run
    run.close()
