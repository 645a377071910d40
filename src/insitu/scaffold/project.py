"""Project: the directory that `insitu init` writes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from insitu.config.schema.document import json_schema
from insitu.errors import Conflict, InvalidRequest, describe
from insitu.scaffold.framework import FRAMEWORKS, Framework
from insitu.wire.values import NAME_PATTERN, plain_name

CONFIG_FILE = "config.yml"
_MODEL = "smollm2"
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
            _serve_command(insitu, _program("python")),
            f"{insitu} try {CONFIG_FILE}",
            f"{insitu} finetune --config_file={CONFIG_FILE}",
        ]

    def write(self) -> list[str]:
        """Write the whole project, or nothing if that fails; return the names of its files."""
        self._check()
        texts = self._texts()
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=f".{self.name}.") as scratch:
                staged = Path(scratch) / self.name
                for name, text in texts.items():
                    (staged / name).parent.mkdir(parents=True, exist_ok=True)
                    (staged / name).write_text(text, encoding="utf-8")
                if self.path.exists():
                    self.path.rmdir()
                staged.rename(self.path)
        except OSError as error:
            raise InvalidRequest(
                f"{self.path} cannot be written: {describe(error)}",
                hint="choose another directory with `cd`, then repeat the command",
            ) from error
        return sorted(texts)

    def _check(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            plain = plain_name(self.name) or "shop"
            raise InvalidRequest(
                f"{self.name!r} cannot name a project: use up to 64 of a-z, 0-9, `.`, `_` and `-`, and "
                "begin with a letter or a digit",
                hint=f"insitu init {plain}",
            )
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise Conflict(f"{self.path} exists and is not a directory", hint="choose another name")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise Conflict(f"{self.path} is not empty", hint="choose another name, or an empty directory")

    def _texts(self) -> dict[str, str]:
        """Return the text of every file by name: the templates, filled in, and the schema."""
        with as_file(files("insitu.scaffold")) as own:
            texts = _templates(own / "shared")
            texts["agent.py"] = (own / "agents" / self.chosen.template).read_text(encoding="utf-8")
        values = {
            _NAME: self.name,
            _LABEL: self.chosen.label,
            _INSTALL: self.chosen.install_command,
            _SERVE: _serve_command("insitu", "python"),
        }
        for name in (CONFIG_FILE, "README.md"):
            texts[name] = _filled(texts[name], values)
        return texts | {"schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"}


def _templates(folder: Path) -> dict[str, str]:
    """Return the files below a folder, without those that make it a package."""
    paths = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        name.as_posix(): path.read_text(encoding="utf-8")
        for name, path in paths.items()
        if not name.parts[0].startswith("__")
    }


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace every placeholder, in one pass: a project may bear the name of another one."""
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], text)


def _serve_command(insitu: str, python: str) -> str:
    """Return the command of a backend for this project, as typed in a shell."""
    return (
        f'{insitu} serve --model "$({python} -m insitu.testing.models {_MODEL})" --model-name {_MODEL} '
        "--max-seq-length 512"
    )


def _program(name: str) -> str:
    """Return the word that runs this installation's program: its name, or its path if that is another's."""
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not own.exists() or (found is not None and Path(found).absolute() == own.absolute()):
        return name
    return shlex.quote(str(own))
