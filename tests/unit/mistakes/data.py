"""Mistakes in the dataset."""

from __future__ import annotations

from tests.unit.mistakes.desk import Desk, Mistake, Provoke, config, text

ROWS_FUNCTION = "def rows():\n    {}\n"


def rows(*given: object) -> Provoke:
    def provoke(desk: Desk):
        desk.write_rows(list(given))
        return desk.run("finetune", "--config_file=config.yml", "--dry-run")

    return provoke


def file(name: str, content: str | bytes) -> Provoke:
    """Data in a file of another kind."""

    def provoke(desk: Desk):
        desk.write(name, content)
        return config(data=name)(desk)

    return provoke


def function(body: str) -> Provoke:
    """Data from a function."""

    def provoke(desk: Desk):
        desk.write("rows.py", ROWS_FUNCTION.format(body))
        return config(data="rows:rows")(desk)

    return provoke


ROW = {"question": "1 + 1", "answer": "2"}
MISTAKES = [
    Mistake(
        "the file is missing",
        config(data="data/train.json"),
        "cannot be read: No such file",
        "data/train.json",
        "relative paths start at",
    ),
    Mistake("no rows", rows(), "has no rows", "train.json", "write at least one"),
    Mistake(
        "one object instead of a list",
        text("train.json", '{"question": "1 + 1"}'),
        "not a list of objects",
        "train.json",
        "[{...}, {...}]",
    ),
    Mistake(
        "lines of JSON in a .json file",
        text("train.json", '{"question": "1"}\n{"question": "2"}\n'),
        "is not JSON",
        "train.json",
        "jsonl",
    ),
    Mistake("a list of texts", rows("1 + 1", "2 + 2"), "not an object", "row 0", '{"question":'),
    Mistake(
        "the question is in another column",
        rows({"prompt": "1 + 1", "answer": "2"}),
        "has no column `question`",
        "columns: prompt, answer",
        "structure.question_key",
    ),
    Mistake(
        "one row without a question",
        rows(ROW, {"question": None, "answer": "4"}),
        "has no `question`",
        "row 1",
        "remove the row",
    ),
    Mistake(
        "only some rows have an id",
        rows({"id": "a", **ROW}, ROW),
        "rows have no `id`",
        "row 1",
        "give every row an id",
    ),
    Mistake(
        "a broken line",
        file("train.jsonl", '{"question": "1"}\n{"question": \n'),
        "is not JSON",
        "line 2",
        "one object per line",
    ),
    Mistake(
        "a comma without quotes in CSV",
        file("train.csv", "question,answer\n1, then 2,3\n"),
        "3 cells, the header has 2",
        "line 2",
        "quote cells",
    ),
    Mistake(
        "a kind of file that is not known",
        file("train.txt", "1 + 1\n"),
        "should be a file or module:function",
        "train.txt",
        ".jsonl",
    ),
    Mistake(
        "text that is not UTF-8",
        file("train.csv", "question,answer\nGr\xf6\xdfe?,2\n".encode("latin-1")),
        "is not UTF-8",
        "train.csv",
        "save the file as UTF-8",
    ),
    Mistake(
        "the filter leaves nothing",
        config(
            data={"file_path": "train.json", "filter": {"allowlist": {"field": {"answer": ["yes"]}}}},
        ),
        "the filters removed all 4 rows",
        "allowlist answer",
        "loosen",
    ),
    Mistake(
        "a function that returns nothing",
        function("pass"),
        "returned a NoneType",
        "rows:rows",
        "return a list of",
    ),
    Mistake(
        "a function that raises",
        function("return open('x.json')"),
        "FileNotFoundError",
        "rows.py:2",
        "correct the function",
    ),
]
