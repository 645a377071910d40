"""Datasets returned by a user's function."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from insitu.datasets.dataset import Dataset
from insitu.datasets.dataset_config import CustomDatasetConfig
from insitu.datasets.example import Example
from insitu.datasets.examples import select, to_examples
from insitu.entry import load_entry
from insitu.errors import InvalidRequest
from insitu.plugins import Kind, Parts, register

_log = logging.getLogger(__name__)


@register(Kind.DATASET, "custom", CustomDatasetConfig)
class CustomDataset(Dataset):
    """The list of rows, or of examples, that ``function(file_path=..., **kwargs)`` returns."""

    def __init__(self, config: CustomDatasetConfig, parts: Parts) -> None:
        self._config = config
        self._function = load_entry(config.function, parts.directory)
        if inspect.iscoroutinefunction(self._function) or inspect.isasyncgenfunction(self._function):
            raise InvalidRequest(f"dataset function `{config.function}` is async; give a plain one")
        self._source = f"dataset function `{config.function}`"

    def load(self) -> list[Example]:
        """Return all examples, filtered and de-duplicated; InvalidRequest names the function and the row."""
        rows = self._rows()
        if rows and all(isinstance(row, Example) for row in rows):
            self._check_examples(rows)
            ids = [example.id for example in rows]
            chosen, self.notes = select([example.row for example in rows], ids, self._config, self._source)
            examples = [rows[at] for at in chosen]
        else:
            self._check_rows(rows)
            examples, self.notes = to_examples(rows, self._config, self._source)
        for note in self.notes:
            _log.info(note)
        return examples

    def _rows(self) -> list[Any]:
        path = self._config.file_path
        place = {} if path is None else {"file_path": str(path.expanduser())}
        try:
            rows = self._function(**place, **self._config.kwargs)
        except Exception as error:
            raise InvalidRequest(f"{self._source} raised {type(error).__name__}: {error}") from error
        if not isinstance(rows, (list, tuple)):
            raise InvalidRequest(
                f"{self._source} returned a {type(rows).__name__}",
                hint="return a list of dicts or of insitu.datasets.example.Example",
            )
        return list(rows)

    def _check_rows(self, rows: list[Any]) -> None:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise InvalidRequest(f"{self._source}: row {number} is a {type(row).__name__}, not a dict")

    def _check_examples(self, examples: list[Example]) -> None:
        for number, example in enumerate(examples):
            if not isinstance(example.id, str) or not example.id:
                raise InvalidRequest(f"{self._source}: example {number} has the id {example.id!r}, not text")
