"""Datasets in files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from insitu.datasets.dataset import Dataset
from insitu.datasets.dataset_config import FileDatasetConfig
from insitu.datasets.example import Example
from insitu.datasets.examples import to_examples
from insitu.datasets.table_rows import read_excel, read_parquet
from insitu.datasets.text_rows import read_csv, read_json, read_jsonl
from insitu.errors import InvalidRequest
from insitu.plugins import Kind, Parts, register
from insitu.system.archives import reject_packed

_log = logging.getLogger(__name__)

READERS: dict[str, Callable[[Path], Sequence[Mapping[str, object]]]] = {
    "json": read_json,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "parquet": read_parquet,
    "xls": read_excel,
}


@register(Kind.DATASET, "json", FileDatasetConfig)
@register(Kind.DATASET, "jsonl", FileDatasetConfig)
@register(Kind.DATASET, "csv", FileDatasetConfig)
@register(Kind.DATASET, "parquet", FileDatasetConfig)
@register(Kind.DATASET, "xls", FileDatasetConfig)
class FileDataset(Dataset):
    """The rows of one file."""

    def __init__(self, config: FileDatasetConfig, parts: Parts) -> None:  # noqa: ARG002 - every component's shape
        self._config = config

    def load(self) -> list[Example]:
        """Return all examples, filtered and de-duplicated; InvalidRequest names the file and the row."""
        path = self._config.file_path.expanduser()
        try:
            if self._config.type_name != "xls":  # .xlsx is a zip archive, with limits of its own
                reject_packed(path)
            rows = READERS[self._config.type_name](path)
        except OSError as error:
            raise InvalidRequest(
                f"dataset {path} cannot be read: {error.strerror or error}",
                hint=f"relative paths start at the current directory, {Path.cwd()}",
            ) from error
        examples, self.notes = to_examples(rows, self._config, str(path))
        for note in self.notes:
            _log.info(note)
        return examples
