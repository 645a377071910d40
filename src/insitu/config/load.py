"""Load and check a configuration: a file, the arguments of a Python call, or both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from insitu import plugins
from insitu.config.config import Config
from insitu.config.defaults import fill_components, fill_names, fill_rate
from insitu.config.expand import Expanded, expand, long_overrides
from insitu.config.short_form import ShortForm, as_short
from insitu.config.values.document import read_document
from insitu.config.values.explain import explain, not_finite
from insitu.config.values.interpolation import Interpolated, interpolate
from insitu.config.values.overrides import override
from insitu.config.values.problems import Location, Problem, dotted, refusal
from insitu.config.values.settings import lay_over, read_settings
from insitu.config.values.tree import put, section, value_at
from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject, JsonValue

CALL = "insitu.finetune"
"""The name of the Python call in errors."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and its origin."""

    config: Config
    path: Path | None
    """None for a Python call without a file."""
    directory: Path
    """The folder of the file, or the current one."""
    source: JsonObject = field(repr=False)
    """The file in its long form, after interpolation and overrides. It holds secrets."""
    short_keys: frozenset[str] = frozenset()
    """The keys of the short form that the file has."""

    def setting(self, *location: str) -> str:
        """Name a setting of the long form as the file would: with its short key, if it has one."""
        return dotted(as_short(location, self.short_keys))


def load_config(path: str | Path, overrides: Iterable[tuple[str, str]] = ()) -> LoadedConfig:
    """Read, interpolate, override, validate. InvalidRequest lists everything that is wrong."""
    read = _read(Path(path))
    plugins.load_entry_points()
    given = list(overrides)
    expanded = expand(read.value, read.texts, given)
    fill_components(expanded)
    before = expanded.source
    expanded.source = override(before, long_overrides(given), ShortForm)
    expanded.texts = {
        at: text for at, text in expanded.texts.items() if _at(expanded.source, at) == _at(before, at)
    }
    return _loaded(expanded, Path(path), str(path))


def load_settings(given: Mapping[str, object], path: str | Path | None = None) -> LoadedConfig:
    """Load the arguments of a Python call, over a file if there is one, with the same errors."""
    read = Interpolated() if path is None else _read(Path(path))
    plugins.load_entry_points()
    settings = read_settings(given)
    document, texts = lay_over(read, settings.values)
    expanded = expand(document, texts, ())
    expanded.problems += settings.problems
    return _loaded(expanded, None if path is None else Path(path), CALL)


def parse_config(source: Mapping[str, object], where: str = "configuration") -> Config:
    """Validate values that are already loaded, with the same errors as for a file."""
    return _validate(expand(section(dict(source)), {}, ()), None, where)


def read_text(path: Path) -> str:
    """Read a text file; InvalidRequest says why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        folder = path.parent
        others = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
        near = plugins.nearest(path.name, others)
        missing = "" if folder.is_dir() else f" (nor does the folder {folder})"
        raise InvalidRequest(f"{path}: the file does not exist{missing}{near}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path}: byte {error.start} is not UTF-8 text", hint="save the file as UTF-8"
        ) from error
    except IsADirectoryError as error:
        raise InvalidRequest(
            f"{path}: is a directory", hint=f"name the file in it, such as {path / 'config.yml'}"
        ) from error
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror or error}") from error


def _read(path: Path) -> Interpolated:
    read = interpolate(read_document(read_text(path), str(path)), os.environ)
    if read.problems:
        raise refusal(str(path), read.problems, hint="export the variable, or give a default")
    return read


def _loaded(expanded: Expanded, path: Path | None, where: str) -> LoadedConfig:
    named_after = path or Path("config.yml")  # a call is named after its folder, as this file would be
    config = _validate(expanded, named_after, where)
    keys = frozenset(expanded.written)
    return LoadedConfig(config, path, named_after.resolve().parent, expanded.source, keys)


def _validate(expanded: Expanded, path: Path | None, where: str) -> Config:
    fill_components(expanded)  # again: an override may have enabled finetuning
    fill_names(expanded, path, os.environ)
    fill_rate(expanded)
    config, problems = check(expanded.source, expanded.texts)
    if any(problem.location == ("reward",) for problem in expanded.problems):
        problems = [problem for problem in problems if problem.location != ("finetuning", "reward_function")]
    problems = expanded.problems + [expanded.as_written(problem) for problem in problems]
    if config is None or problems:
        raise refusal(where, problems)
    return config


def check(source: JsonObject, texts: Mapping[Location, str]) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, if valid, and all problems. Where a string is expected, `texts` are used."""
    problems = list(not_finite(source))
    try:
        return Config.model_validate(source), problems
    except ValidationError as error:
        if _restore_texts(error, source, texts):
            return check(source, {})
        found = {problem.location for problem in problems}
        return None, problems + [
            each for each in explain(error, ShortForm, source) if each.location not in found
        ]


def _restore_texts(error: ValidationError, source: JsonObject, texts: Mapping[Location, str]) -> bool:
    """Use the text of an interpolation, in place, where a string is expected; True if anything changed."""
    wanted = [line["loc"] for line in error.errors() if line["type"] in ("string_type", "path_type")]
    places = [location for location in texts if location in wanted]
    for location in places:
        put(source, location, texts[location])
    return bool(places)


def _at(values: JsonValue, location: Location) -> JsonValue:
    """Return the value at a location; None if an override removed it."""
    try:
        return value_at(values, location)
    except LookupError:
        return None
