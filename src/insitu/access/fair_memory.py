"""Memory that projects share: when it is full, the project that has the most forgets its oldest use first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class FairMemory(Generic[Key, Value]):
    """Values by key, each with a weight. It forgets nothing by itself: `forget` chooses what goes."""

    def __init__(self, project_of: Callable[[Key], str | None]) -> None:
        self.weight = 0
        self._project_of = project_of
        self._values: dict[str | None, OrderedDict[Key, Value]] = {}
        self._weights: Counter[str | None] = Counter()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which counts as a use of it."""
        values = self._values.get(self._project_of(key))
        if values is None or key not in values:
            return None
        values.move_to_end(key)
        return values[key]

    def look(self, key: Key) -> Value | None:
        """Return the value of a key, which does not count as a use."""
        return self._values.get(self._project_of(key), {}).get(key)

    def put(self, key: Key, value: Value) -> Value:
        """Remember a value under a new key; return it."""
        values = self._values.setdefault(self._project_of(key), OrderedDict())
        self._num += key not in values
        values[key] = value
        return value

    def add_weight(self, key: Key, weight: int) -> None:
        """Add to the weight of a key's project; negative where something of it went."""
        self.weight += weight
        self._weights[self._project_of(key)] += weight

    def forget(self, *, by_weight: bool) -> tuple[Key, Value]:
        """Forget the least recently used value of the project with the most weight, or the most values.

        The caller takes its weight away.
        """
        having = [project for project, values in self._values.items() if values]
        most = max(having, key=lambda project: self._size(project, by_weight=by_weight))
        key, value = self._values[most].popitem(last=False)
        self._num -= 1
        if not self._values[most]:
            del self._values[most]
        return key, value

    def _size(self, project: str | None, *, by_weight: bool) -> int:
        return self._weights[project] if by_weight else len(self._values[project])
