"""Every type of dataset, read from real files, and what is refused."""

from __future__ import annotations

import importlib
import json
import sys
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from insitu.datasets.dataset_config import FileDatasetConfig, dataset_config
from insitu.datasets.example import Example
from insitu.errors import InvalidRequest
from tests.unit.rewards.biff import write_xls

ROWS = [{"id": 1, "question": "2+2", "answer": "4"}, {"id": 2, "question": "3+3", "answer": "6"}]
EXAMPLES = [Example("1", "2+2", "4", ROWS[0]), Example("2", "3+3", "6", ROWS[1])]


def test_json(tmp_path, dataset):
    (tmp_path / "d.json").write_text("\ufeff" + json.dumps(ROWS), encoding="utf-8")
    assert dataset("json", file_path=tmp_path / "d.json").load() == EXAMPLES


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"rows": []}', "holds a dict, not a list"),
        ("[1]", "row 0 is a int"),
        ("[", "is not JSON"),
        ("[NaN]", "NaN is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "has no rows"),
    ],
)
def test_bad_json_is_refused(tmp_path, dataset, text, complaint):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        dataset("json", file_path=tmp_path / "d.json").load()
    assert "d.json" in str(caught.value)


def test_jsonl_skips_empty_lines_and_keeps_line_separators_in_text(tmp_path, dataset):
    odd = {"id": "a", "question": "one\u2028two", "answer": None}
    lines = [json.dumps(odd, ensure_ascii=False), "", json.dumps(ROWS[0])]
    (tmp_path / "d.jsonl").write_text("\r\n".join(lines), encoding="utf-8")
    assert dataset("jsonl", file_path=tmp_path / "d.jsonl").load() == [
        Example("a", "one\u2028two", None, odd),
        EXAMPLES[0],
    ]


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (b'{"id": 2, "quest', "line 2 is not JSON"),
        (b"[]", "line 2 holds a list"),
        (b"\xff", "line 2 is not UTF-8"),
        (b'{"id": 2, "question": Infinity}', "line 2 is not JSON: Infinity"),
    ],
)
def test_a_bad_line_is_named(tmp_path, dataset, second, complaint):
    (tmp_path / "d.jsonl").write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + second + b"\n")
    with pytest.raises(InvalidRequest, match=complaint):
        dataset("jsonl", file_path=tmp_path / "d.jsonl").load()


def test_csv(tmp_path, dataset):
    long = "x" * 200_000
    (tmp_path / "d.csv").write_text(
        f'\ufeffid,question,answer\n1,"a, b\nc",{long}\n\n2,d,\n', encoding="utf-8"
    )
    first, second = dataset("csv", file_path=tmp_path / "d.csv").load()
    assert (first.id, first.input, first.expected) == ("1", "a, b\nc", long)
    assert (second.id, second.expected) == ("2", "")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no header"),
        ("id,id\n1,2\n", "several columns called 'id'"),
        ("id,question\n1,a\n2\n", "line 3 has 1 cells, the header has 2"),
        ("id,question\n1,a,b\n", "line 2 has 3 cells"),
        ('id,question\n1,"a"b\n', "line 2 is not CSV"),
        ('id,question\n1,"a\n', "is not CSV"),
        ("id,question\n", "has no rows"),
    ],
)
def test_bad_csv_is_refused(tmp_path, dataset, text, complaint):
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(InvalidRequest, match=complaint):
        dataset("csv", file_path=tmp_path / "d.csv").load()


def test_parquet_values_become_json(tmp_path, dataset):
    table = pa.table(
        {
            "id": pa.array([1.0, 2.0]),
            "question": ["a", "b"],
            "answer": pa.array([float("nan"), 2.5]),
            "day": [date(2026, 1, 2), None],
            "price": [Decimal("1.50"), Decimal("7.00")],
            "raw": [b"\x00", b""],
            "nested": [{"n": [float("nan")]}, {"n": []}],
        }
    )
    pq.write_table(table, tmp_path / "d.parquet")
    first, second = dataset("parquet", file_path=tmp_path / "d.parquet").load()
    assert [first.id, second.id] == ["1", "2"]
    assert [first.expected, second.expected] == [None, 2.5]
    assert first.row["day"] == "2026-01-02"
    assert [first.row["price"], second.row["price"]] == [1.5, 7]
    assert first.row["raw"] == "AA=="
    assert first.row["nested"] == {"n": [None]}
    json.dumps([first.row, second.row], allow_nan=False)


def test_infinity_is_refused_with_its_place(tmp_path, dataset):
    pq.write_table(pa.table({"question": ["a", "b"], "weight": [1.0, float("inf")]}), tmp_path / "d.parquet")
    with pytest.raises(InvalidRequest, match="row 1, column `weight`: infinity"):
        dataset("parquet", file_path=tmp_path / "d.parquet").load()


def test_a_damaged_parquet_file_is_named(tmp_path, dataset):
    (tmp_path / "d.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(InvalidRequest, match=r"d\.parquet is not a Parquet file"):
        dataset("parquet", file_path=tmp_path / "d.parquet").load()


LINES = [
    ["id", "question", "answer", "when", "ok"],
    [7, "a", 2.5, datetime(2026, 1, 2, 3, 4, 5), True],
    [None, None, None, None, None],
    [8, "b", None, None, None],
]


def _write_xlsx(path: Path, lines: list) -> None:
    book = openpyxl.Workbook()
    for line in lines:
        book.worksheets[0].append(line)
    book.save(path)


@pytest.mark.parametrize(
    ("name", "write"), [("d.xlsx", _write_xlsx), ("d.xls", write_xls), ("x.xls", _write_xlsx)]
)
def test_excel_both_formats_whatever_the_name(tmp_path, dataset, name, write):
    write(tmp_path / name, LINES)
    first, second = dataset("xls", file_path=tmp_path / name).load()
    assert (first.id, first.input, first.expected) == ("7", "a", 2.5)
    assert first.row["when"] == "2026-01-02T03:04:05"
    assert first.row["ok"] is True
    assert (second.id, second.expected, second.row["when"]) == ("8", None, None)


def test_excel_error_cells_are_null(tmp_path, dataset):
    _write_xlsx(tmp_path / "d.xlsx", [["question", "answer"], ["a", "#N/A"]])
    assert dataset("xls", file_path=tmp_path / "d.xlsx").load()[0].expected is None


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"PK\x03\x04junk", "not an Excel file"), (b"junk", "not an Excel file")]
)
def test_a_damaged_excel_file_is_named(tmp_path, dataset, content, complaint):
    (tmp_path / "d.xls").write_bytes(content)
    with pytest.raises(InvalidRequest, match=complaint):
        dataset("xls", file_path=tmp_path / "d.xls").load()


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([], "is empty"),
        ([["id", None, "x"], [1, 2, 3]], "column 2 has no name"),
        ([["a", "a"], [1, 2]], "several"),
    ],
)
def test_a_bad_sheet_is_refused(tmp_path, dataset, lines, complaint):
    _write_xlsx(tmp_path / "d.xlsx", lines)
    with pytest.raises(InvalidRequest, match=complaint):
        dataset("xls", file_path=tmp_path / "d.xlsx").load()


@pytest.mark.parametrize("library", ["pyarrow", "openpyxl", "xlrd"])
def test_a_missing_library_says_what_to_install(tmp_path, dataset, monkeypatch, library):
    path = tmp_path / "d"
    path.write_bytes(b"PK\x03\x04" if library == "openpyxl" else b"")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidRequest, match=rf"needs {library}.*\n.*pip install 'insitu\[data\]'"):
        dataset("parquet" if library == "pyarrow" else "xls", file_path=path).load()


def test_importing_the_room_does_not_import_heavy_libraries():
    import subprocess

    code = "import insitu.rewards.components, sys; print({'pyarrow', 'openpyxl', 'xlrd'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == "set()\n"


def test_a_missing_file_says_where_paths_start(tmp_path, dataset, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=rf"nowhere\.json cannot be read: No such file(.|\n)*{tmp_path}"):
        dataset("json", file_path="nowhere.json").load()
    with pytest.raises(InvalidRequest, match="cannot be read: Is a directory"):
        dataset("json", file_path=tmp_path).load()


MODULE = """
from insitu.datasets.example import Example

def rows(file_path=None, count=2):
    return [{"id": n, "question": file_path} for n in range(count)]

def examples():
    return [Example("a", 1, 2, {"k": "x"}), Example("a", 9, 9, {"k": "x"}), Example("b", 1, 2, {"k": "y"})]

def fails(): raise KeyError("colour")
def text(): return "rows"
def mixed(): return [{"id": 1}, 2]
def numbered(): return [Example(1, 1, 2, {})]
async def waits(): return []
CONSTANT = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_rows_module.py").write_text(MODULE)
    importlib.invalidate_caches()
    yield "my_rows_module"
    sys.modules.pop("my_rows_module", None)


@pytest.mark.parametrize("separator", [".", ":"])
def test_custom_rows(dataset, module, separator):
    data = dataset("custom", function=f"{module}{separator}rows", file_path="x.bin", kwargs={"count": 3})
    assert [(example.id, example.input) for example in data.load()] == [
        ("0", "x.bin"),
        ("1", "x.bin"),
        ("2", "x.bin"),
    ]


def test_custom_examples_are_filtered_and_unique(dataset, module):
    data = dataset("custom", function=f"{module}.examples")
    assert data.load() == [Example("a", 1, 2, {"k": "x"}), Example("b", 1, 2, {"k": "y"})]
    kept = dataset("custom", function=f"{module}.examples", filter={"denylist": {"field": {"k": ["x"]}}})
    assert [example.id for example in kept.load()] == ["b"]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("fails", "raised KeyError: 'colour'"),
        ("text", "returned a str"),
        ("mixed", "row 1 is a int"),
        ("numbered", "example 0 has the id 1"),
        ("waits", "is async"),
        ("row", "has no `row`; did you mean `rows`"),
        ("CONSTANT", "is a int, not a function"),
    ],
)
def test_custom_functions_that_are_refused(dataset, module, function, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        dataset("custom", function=f"{module}:{function}").load()


def test_custom_module_that_does_not_exist(dataset):
    with pytest.raises(InvalidRequest, match="there is no module `no_such_module`"):
        dataset("custom", function="no_such_module:rows")
    with pytest.raises(InvalidRequest, match="does not name a function"):
        dataset("custom", function="rows")


def test_custom_file_path_given_twice(dataset):
    with pytest.raises(ValidationError, match="given twice"):
        dataset("custom", function="a.b", file_path="x", kwargs={"file_path": "y"})


@pytest.mark.parametrize(
    ("path", "type_name"),
    [
        ("a.json", "json"),
        ("a.JSONL", "jsonl"),
        ("a.csv", "csv"),
        ("a.parquet", "parquet"),
        ("a.xls", "xls"),
        ("a.xlsx", "xls"),
    ],
)
def test_the_type_of_a_path_is_told_by_its_extension(path, type_name):
    config = dataset_config(path)
    assert isinstance(config, FileDatasetConfig)
    assert (config.type_name, config.file_path) == (type_name, Path(path))


def test_another_path_keeps_ids_filter_and_structure(tmp_path, dataset, component):
    _, base = component(
        "dataset",
        "json",
        file_path="a.json",
        id_key="key",
        filter={"allowlist": {"field": {"level": ["hard"]}}},
        structure={"question_key": "q", "answer_key": "typo"},
    )
    config = dataset_config("b.csv", base)
    assert config.model_dump(exclude={"type_name", "file_path"}) == base.model_dump(
        exclude={"type_name", "file_path"}
    )
    assert (config.type_name, config.file_path) == ("csv", Path("b.csv"))


def test_a_function_that_reads_files_reads_the_other_file(component):
    _, reads = component("dataset", "custom", function="a.b", file_path="x.bin", kwargs={"n": 1})
    config = dataset_config("y.bin", reads)
    assert (config.type_name, config.file_path, config.kwargs) == ("custom", Path("y.bin"), {"n": 1})
    _, makes = component("dataset", "custom", function="a.b", id_key="key")
    config = dataset_config("y.jsonl", makes)
    assert (config.type_name, config.id_key) == ("jsonl", "key")


def test_an_unknown_extension_is_refused():
    with pytest.raises(InvalidRequest, match=r"`a\.txt` has the extension `\.txt`, which names no type"):
        dataset_config("a.txt")
