"""Every dataset of this project against its contract."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from insitu.plugins import Kind
from insitu.testing.contracts import DatasetContract
from insitu.testing.standins import StandinParts, built

ROWS = [{"id": f"row-{n}", "question": f"what is {n}?", "answer": str(n)} for n in (3, 1, 2)]


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def write_jsonl(path: Path) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    import datetime

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(
        [row | {"when": datetime.datetime(2026, 1, 1), "data": b"\x00\xff", "score": 0.5} for row in ROWS]
    )
    pyarrow.parquet.write_table(table, path)


def write_xlsx(path: Path) -> None:
    import datetime

    import openpyxl

    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    sheet.append([*ROWS[0], "when"])
    for row in ROWS:
        sheet.append([*row.values(), datetime.datetime(2026, 1, 1)])
    book.save(path)


class _File(DatasetContract):
    type_name: str
    suffix: str
    write: Any

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.file = tmp_path / f"data.{self.suffix}"
        type(self).write(self.file)

    def make(self) -> Any:
        return self._made(self.file)

    def make_broken(self) -> Any:
        broken = self.directory / f"broken.{self.suffix}"
        broken.write_bytes(b'{"id": \xff')
        return self._made(broken)

    def _made(self, path: Path) -> Any:
        return built(Kind.DATASET, self.type_name, StandinParts(self.directory), file_path=str(path))


class TestJson(_File):
    type_name = suffix = "json"
    write = staticmethod(write_json)


class TestJsonLines(_File):
    type_name = suffix = "jsonl"
    write = staticmethod(write_jsonl)


class TestCsv(_File):
    type_name = suffix = "csv"
    write = staticmethod(write_csv)

    def make_broken(self) -> Any:
        return self._made(self.directory / "missing.csv")


class TestParquet(_File):
    type_name = suffix = "parquet"
    write = staticmethod(write_parquet)


class TestExcel(_File):
    type_name, suffix = "xls", "xlsx"
    write = staticmethod(write_xlsx)


def rows(broken: bool = False) -> list[dict[str, Any]]:
    if broken:
        raise OSError("no such source")
    return ROWS


class TestCustom(DatasetContract):
    def make(self) -> Any:
        return self._made({})

    def make_broken(self) -> Any:
        return self._made({"broken": True})

    def _made(self, kwargs: dict[str, Any]) -> Any:
        function = f"{__name__}:rows"
        return built(Kind.DATASET, "custom", StandinParts(self.directory), function=function, kwargs=kwargs)
