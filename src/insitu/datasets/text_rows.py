"""Rows of text files: JSON, JSON lines, CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from insitu.datasets.values import parse_json
from insitu.errors import InvalidRequest
from insitu.json_values import JsonObject

if TYPE_CHECKING:
    from _csv import Reader  # the type of `csv.reader(...)`, which only type checkers know by name

EXAMPLE_ROW = '{"question": "1 + 1", "answer": "2"}'
_ONE_PER_LINE = f"write one object per line: {EXAMPLE_ROW}"
_MAX_CELL_CHARACTERS = 2**30
"""The csv module's own limit, 128 Ki characters, is too low for long prompts."""


def read_json(path: Path) -> list[JsonObject]:
    """Read a list of objects."""
    try:
        found = parse_json(_decode(path, path.read_bytes()))
    except ValueError as error:
        hint = f"write one list: [{EXAMPLE_ROW}, …]; a file with one object per line ends in .jsonl"
        raise InvalidRequest(f"{path} is not JSON: {error}", hint=hint) from error
    if not isinstance(found, list):
        raise InvalidRequest(
            f"{path} holds a {type(found).__name__}, not a list of objects",
            hint="put the rows into one list: [{...}, {...}]; for one object per line use _type: jsonl",
        )
    rows: list[JsonObject] = []
    for number, row in enumerate(found):
        if not isinstance(row, dict):
            raise InvalidRequest(
                f"{path}: row {number} is a {type(row).__name__}, not an object",
                hint=f"write each row as {EXAMPLE_ROW}",
            )
        rows.append(row)
    return rows


def read_jsonl(path: Path) -> list[JsonObject]:
    """Read one object per line; empty lines are skipped."""
    rows: list[JsonObject] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        text = _decode(path, line, line=number).strip()
        if not text:
            continue
        try:
            row = parse_json(text)
        except ValueError as error:
            raise InvalidRequest(f"{path}, line {number} is not JSON: {error}", hint=_ONE_PER_LINE) from error
        if not isinstance(row, dict):
            said = f"{path}, line {number} holds a {type(row).__name__}, not an object"
            raise InvalidRequest(said, hint=_ONE_PER_LINE)
        rows.append(row)
    return rows


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read comma-separated values with a header; all cells are text."""
    text = _decode(path, path.read_bytes())
    former = csv.field_size_limit(_MAX_CELL_CHARACTERS)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, list[str]())
        _check_header(path, header)
        return [dict(zip(header, cells, strict=True)) for cells in _records(path, reader, len(header))]
    except csv.Error as error:
        raise InvalidRequest(f"{path}, line {reader.line_num} is not CSV: {error}") from error
    finally:
        csv.field_size_limit(former)


def _records(path: Path, reader: Reader, num_columns: int) -> Iterator[list[str]]:
    for cells in reader:
        if not cells:
            continue
        if len(cells) != num_columns:
            raise InvalidRequest(
                f"{path}, line {reader.line_num} has {len(cells)} cells, the header has {num_columns}",
                hint="quote cells that contain commas or line breaks",
            )
        yield cells


def _check_header(path: Path, header: list[str]) -> None:
    if not header:
        raise InvalidRequest(
            f"{path} has no header line", hint="write the names of the columns into the first line"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise InvalidRequest(
            f"{path} has several columns called {', '.join(map(repr, twice))}", hint="rename all but one"
        )


def _decode(path: Path, data: bytes, line: int | None = None) -> str:
    try:
        return data.decode("utf-8-sig" if line in (None, 1) else "utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start}" if line is None else f"line {line}"
        raise InvalidRequest(
            f"{path}, {place} is not UTF-8: {error.reason}", hint="save the file as UTF-8"
        ) from error
