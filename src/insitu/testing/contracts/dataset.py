"""The contract of datasets."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from typing import Any

from insitu.datasets.dataset import Dataset
from insitu.datasets.example import Example
from insitu.testing.contracts.contract import Contract, assert_json, assert_refused, opened


class DatasetContract(Contract):
    """For a `Dataset`."""

    def make_broken(self) -> Any:
        """Return a dataset whose source is missing or damaged; None if there is no such thing."""
        return None

    def test_it_gives_examples(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as dataset:
                assert isinstance(dataset, Dataset), "subclass insitu.datasets.dataset.Dataset"
                examples = dataset.load()
            assert isinstance(examples, list), "load must return a list"
            assert examples, "`make` must give a dataset that has examples"
            given: list[object] = [*examples]  # whatever the annotations of a third party say
            wrong = [each for each in given if not isinstance(each, Example)]
            assert not wrong, f"load must return insitu.datasets.example.Example, not {wrong[:1]}"

        self.within_deadline(test)

    def test_ids_are_unique_text(self) -> None:
        ids: list[object] = [example.id for example in self._load()]
        wrong = [each for each in ids if not isinstance(each, str) or not each]
        assert not wrong, f"an id must be text that is not empty: {wrong}"
        twice = [each for each, count in Counter(ids).items() if count > 1]
        assert not twice, f"an id must be there once: {twice}"

    def test_the_order_is_stable(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as dataset:
                first, second = dataset.load(), dataset.load()
            assert first == second, "a second load must give the same examples in the same order"

        self.within_deadline(test)
        assert self._load() == self._load(), "another instance must give the same examples in the same order"

    def test_a_load_does_not_depend_on_what_was_done_with_the_one_before(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as dataset:
                first = dataset.load()
                before = copy.deepcopy(first)
                first.clear()
                assert dataset.load() == before, "load must return a list of its own each time"

        self.within_deadline(test)

    def test_rows_are_json(self) -> None:
        for example in self._load():
            assert_json(dict(example.row), f"the row of {example.id}")
            assert_json(example.input, f"the input of {example.id}")
            assert_json(example.expected, f"the expected answer of {example.id}")

    def test_a_source_that_cannot_be_read_is_refused(self) -> None:
        async def test() -> None:
            if self.make_broken() is None:
                return

            async def load() -> object:
                async with opened(self.make_broken()) as dataset:
                    return await asyncio.to_thread(dataset.load)

            await assert_refused(load(), "a dataset that cannot be read")

        self.within_deadline(test)

    def _load(self) -> list[Example]:
        async def load() -> list[Example]:
            async with opened(self.make()) as dataset:
                return dataset.load()

        return self.within_deadline(load)
