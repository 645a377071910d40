"""The type of a dataset by its file's extension."""

from __future__ import annotations

TYPE_BY_SUFFIX = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".xls": "xls",
    ".xlsx": "xls",
}
