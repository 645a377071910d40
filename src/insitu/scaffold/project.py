"""Project: the directory that `insitu init` writes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from insitu.config.schema.document import json_schema
from insitu.errors import Conflict, InvalidRequest, describe
from insitu.scaffold.framework import FRAMEWORKS, Framework
from insitu.system.files import files_below
from insitu.wire.values import NAME_PATTERN

SERVED = "smollm2"
CONFIG_FILE = "config.yml"
_AGENT, _SCHEMA, _README = "agent.py", "schema.json", "README.md"
_NAME, _LABEL, _INSTALL, _SERVE = "project-name", "framework-name", "install-command", "serve-command"
"""Placeholders in the templates."""


@dataclass(frozen=True, slots=True)
class Project:
    """A project that is to be written below the working directory."""

    name: str
    framework: str

    @property
    def path(self) -> Path:
        """The project's directory."""
        return Path.cwd() / self.name

    @property
    def chosen(self) -> Framework:
        """The framework of its agent."""
        return FRAMEWORKS[self.framework]

    def commands(self) -> list[str]:
        """Return the next commands in their order, to be run in the directory."""
        insitu = _program("insitu")
        return [
            serve_command(insitu, _program("python")),
            f"{insitu} try {CONFIG_FILE}",
            f"{insitu} finetune --config_file={CONFIG_FILE}",
        ]

    def write(self) -> list[str]:
        """Write the project and return the names of its files; nothing is written if it is rejected."""
        self._check()
        try:
            self._copy()
            return files_below(self.path, lambda name: Conflict(f"{self.path / name} is not a plain file"))
        except OSError as error:
            raise InvalidRequest(
                f"{self.path} cannot be written: {describe(error)}",
                hint="choose another directory with `cd`, then repeat the command",
            ) from error

    def _check(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            plain = re.sub(r"[^a-z0-9._-]+", "-", self.name.lower()).strip("._-")[:64] or "shop"
            raise InvalidRequest(
                f"{self.name!r} cannot name a project: use up to 64 of a-z, 0-9, `.`, `_` and `-`, and "
                "begin with a letter or a digit",
                hint=f"insitu init {plain}",
            )
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise Conflict(f"{self.path} exists and is not a directory", hint="choose another name")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise Conflict(f"{self.path} is not empty", hint="choose another name, or an empty directory")

    def _copy(self) -> None:
        """Copy the templates, with this project's names in place of theirs."""
        with as_file(files("insitu.scaffold")) as own:
            shutil.copytree(
                own / "shared", self.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__*")
            )
            shutil.copyfile(own / "agents" / self.chosen.template, self.path / _AGENT)
        schema = json.dumps(json_schema(), indent=2, ensure_ascii=False)
        (self.path / _SCHEMA).write_text(f"{schema}\n", encoding="utf-8")
        self._fill(CONFIG_FILE, {_NAME: self.name})
        self._fill(
            _README,
            {
                _NAME: self.name,
                _LABEL: self.chosen.label,
                _INSTALL: self.chosen.install_command,
                _SERVE: serve_command("insitu", "python"),
            },
        )

    def _fill(self, name: str, values: dict[str, str]) -> None:
        path = self.path / name
        text = path.read_text(encoding="utf-8")
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        path.write_text(text, encoding="utf-8")


def serve_command(insitu: str, python: str) -> str:
    """Return the command of a backend for this project, as typed in a shell."""
    return (
        f'{insitu} serve --model "$({python} -m insitu.testing.models {SERVED})" --model-name {SERVED} '
        "--max-seq-length 512"
    )


def _program(name: str) -> str:
    """Return the word that runs this installation's program: its name, or its path if that is another's."""
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not own.exists() or (found is not None and Path(found).absolute() == own.absolute()):
        return name
    return shlex.quote(str(own))
