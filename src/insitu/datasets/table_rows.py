"""Rows of Parquet and Excel files. Their libraries come with the extra `data`."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from insitu.errors import InvalidRequest, describe, foreign_code
from insitu.system.torch_builds.installing import install_command

Row = Mapping[str, object]
Line = Sequence[object]
"""The cells of one row."""

_ZIP = b"PK\x03\x04"
"""First bytes of an .xlsx file, whatever its name."""
_MAX_UNPACKED_BYTES = 2**30
_ERROR_CELLS = ("#N/A", "#DIV/0!", "#NAME?", "#NULL!", "#NUM!", "#REF!", "#VALUE!")
"""Values that openpyxl returns for a failed formula."""


def read_parquet(path: Path) -> list[Row]:
    """Read all columns of a Parquet file."""
    arrow = _library("pyarrow")
    parquet = _library("pyarrow.parquet")
    try:
        return cast("list[Row]", parquet.ParquetFile(path).read().to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise InvalidRequest(f"{path} is not a Parquet file: {describe(error)}") from error


def read_excel(path: Path) -> list[Row]:
    """Read the first sheet of an .xlsx or .xls file; its first row is the header."""
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    library = _library("openpyxl" if is_zip else "xlrd")
    if is_zip:
        _check_unpacked(path)
    # openpyxl lets through whatever zipfile, its XML parser and its own checks raise; on a damaged file xlrd
    # raises anything from XLRDError to struct.error.
    with foreign_code(lambda error: InvalidRequest(f"{path} is not an Excel file: {describe(error)}")):
        lines = _xlsx_lines(library, path) if is_zip else _xls_lines(library, path)
    if not lines:
        raise InvalidRequest(f"the first sheet of {path} is empty", hint="put the rows into the first sheet")
    header = _header(path, lines[0])
    return [dict(zip(header, line, strict=False)) for line in lines[1:]]


def _check_unpacked(path: Path) -> None:
    """Reject a workbook that would grow without bound; zipfile reads no more of a part than it announces."""
    with (
        foreign_code(lambda error: InvalidRequest(f"{path} is not an Excel file: {describe(error)}")),
        zipfile.ZipFile(path) as archive,
    ):
        size = sum(part.file_size for part in archive.infolist())
    if size > _MAX_UNPACKED_BYTES:
        raise InvalidRequest(
            f"{path} unpacks to {size} bytes; at most {_MAX_UNPACKED_BYTES} are read from an .xlsx file",
            hint="save the rows as CSV or Parquet",
        )


def _xlsx_lines(openpyxl: ModuleType, path: Path) -> list[Line]:
    # An open file, because openpyxl judges a path by its extension.
    with path.open("rb") as file:
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        lines = _trimmed(book.worksheets[0].iter_rows(values_only=True))
    return [[None if cell in _ERROR_CELLS else cell for cell in line] for line in lines]


def _xls_lines(xlrd: ModuleType, path: Path) -> list[Line]:
    with xlrd.open_workbook(path, on_demand=True) as book:
        rows = book.sheet_by_index(0).get_rows()
        return _trimmed([_xls_value(xlrd, book.datemode, cell) for cell in row] for row in rows)


def _xls_value(xlrd: ModuleType, datemode: int, cell: Any) -> object:
    """Return the value of one of xlrd's cells, a class without types."""
    if cell.ctype in (xlrd.XL_CELL_EMPTY, xlrd.XL_CELL_BLANK, xlrd.XL_CELL_ERROR):
        return None
    if cell.ctype == xlrd.XL_CELL_BOOLEAN:
        return bool(cell.value)
    if cell.ctype == xlrd.XL_CELL_DATE:
        return xlrd.xldate.xldate_as_datetime(cell.value, datemode)
    if cell.ctype == xlrd.XL_CELL_NUMBER and cell.value.is_integer():
        # The format knows only floats; Excel shows 7, not 7.0.
        return int(cell.value)
    return cell.value


def _trimmed(lines: Iterable[Line]) -> list[Line]:
    """Remove the empty rows that spreadsheets tend to keep."""
    return [line for line in lines if any(cell not in (None, "") for cell in line)]


def _header(path: Path, cells: Line) -> list[str]:
    names = ["" if cell is None else str(cell) for cell in cells]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise InvalidRequest(
            f"{path}: column {names.index('') + 1} has no name in the first row", hint="name it or delete it"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRequest(
            f"{path} has several columns called {', '.join(map(repr, twice))}", hint="rename all but one"
        )
    return names


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidRequest(
            f"this type of dataset needs {name.partition('.')[0]}, which is not installed",
            hint=install_command("insitu[data]"),
        ) from error
