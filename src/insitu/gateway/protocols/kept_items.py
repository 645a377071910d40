"""The items of the latest responses: a client may name one (`item_reference`) instead of sending it again."""

from __future__ import annotations

from typing import Any

import orjson

from insitu.access.fair_memory import FairMemory

_MAX_BYTES = 64 * 2**20


class _Memory:
    """Output items by owner and id, in this process's memory only; the owner with the most forgets first."""

    def __init__(self, max_bytes: int) -> None:
        self.items = FairMemory[tuple[str | None, str], bytes](lambda key: key[0])
        self._max_bytes = max_bytes

    def add(self, key: tuple[str | None, str], data: bytes) -> None:
        self.items.put(key, data)
        self.items.add_weight(key, len(data))
        while self.items.weight > self._max_bytes:
            gone, dropped = self.items.forget(by_weight=True)
            self.items.add_weight(gone, -len(dropped))


class KeptItems:
    """The items of one project, and of keys without a project. All share the memory."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._memory = _Memory(max_bytes)
        self._project: str | None = None

    def within(self, project: str | None) -> KeptItems:
        """Return the items of another project, in the same memory."""
        other = KeptItems(0)
        other._memory, other._project = self._memory, project
        return other

    def keep(self, asked: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep the items of an answer, unless its request said `store: false`."""
        for item in items if asked.get("store") is not False else []:
            self._memory.add((self._project, item["id"]), orjson.dumps(item))

    def find(self, item_id: object) -> dict[str, Any] | None:
        data = self._memory.items.look((self._project, item_id)) if isinstance(item_id, str) else None
        return None if data is None else orjson.loads(data)
