"""Datasets returned by a user's function."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import cast

from insitu.datasets.dataset import Dataset
from insitu.datasets.dataset_config import CustomDatasetConfig
from insitu.datasets.example import Example
from insitu.datasets.examples import select, to_examples
from insitu.entry import load_entry
from insitu.errors import InvalidRequest, describe, foreign_code
from insitu.given import ROWS
from insitu.plugins import Kind, Parts, register
from insitu.user_traceback import with_frames

_log = logging.getLogger(__name__)


@register(Kind.DATASET, "custom", CustomDatasetConfig)
class CustomDataset(Dataset):
    """The list of rows, or of examples, that ``function(file_path=..., **kwargs)`` returns."""

    def __init__(self, config: CustomDatasetConfig, parts: Parts) -> None:
        self._config = config
        self._function = load_entry(config.function, parts.directory)
        if inspect.iscoroutinefunction(self._function) or inspect.isasyncgenfunction(self._function):
            raise InvalidRequest(
                f"dataset function `{config.function}` is async", hint="write it as a plain `def`"
            )
        given = config.function == ROWS
        self._source = "the given rows" if given else f"dataset function `{config.function}`"

    def load(self) -> list[Example]:
        """Return all examples, filtered and de-duplicated; InvalidRequest names the function and the row."""
        rows = self._rows()
        given = [row for row in rows if isinstance(row, Example)]
        if given and len(given) == len(rows):
            ids = self._checked_ids(given)
            chosen, self.notes = select([one.row for one in given], ids, self._config, self._source)
            examples = [given[at] for at in chosen]
        else:
            examples, self.notes = to_examples(self._checked_rows(rows), self._config, self._source)
        for note in self.notes:
            _log.info(note)
        return examples

    def _rows(self) -> list[object]:
        path = self._config.file_path
        place = {} if path is None else {"file_path": str(path.expanduser())}
        with foreign_code(self._raised):
            rows = self._function(**place, **self._config.kwargs)
        if not isinstance(rows, (list, tuple)):
            raise InvalidRequest(
                f"{self._source} returned a {type(rows).__name__}",
                hint="return a list of dicts or of insitu.datasets.example.Example",
            )
        return list(cast("Sequence[object]", rows))

    def _raised(self, error: BaseException) -> InvalidRequest:
        return InvalidRequest(
            with_frames(f"{self._source} raised {describe(error)}", error),
            hint="correct the function, then repeat the command",
        )

    def _checked_rows(self, rows: list[object]) -> list[Mapping[str, object]]:
        checked: list[Mapping[str, object]] = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise InvalidRequest(f"{self._source}: row {number} is a {type(row).__name__}, not a dict")
            checked.append(cast("Mapping[str, object]", row))
        return checked

    def _checked_ids(self, examples: list[Example]) -> list[str]:
        ids: list[object] = [example.id for example in examples]
        for number, given in enumerate(ids):
            if not isinstance(given, str) or not given:
                raise InvalidRequest(f"{self._source}: example {number} has the id {given!r}, not text")
        return cast("list[str]", ids)
