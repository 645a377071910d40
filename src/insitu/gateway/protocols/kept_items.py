"""The items of the latest responses: a client may name one (`item_reference`) instead of sending it again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import orjson

_MAX_BYTES = 64 * 2**20


class KeptItems:
    """Output items by id, oldest evicted first. In this process's memory only."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._items: OrderedDict[str, bytes] = OrderedDict()
        self._left = max_bytes

    def keep(self, asked: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep the items of an answer, unless its request said `store: false`."""
        for item in items if asked.get("store") is not False else []:
            self._items[item["id"]] = data = orjson.dumps(item)
            self._left -= len(data)
        while self._left < 0:
            self._left += len(self._items.popitem(last=False)[1])

    def find(self, item_id: object) -> dict[str, Any] | None:
        data = self._items.get(item_id) if isinstance(item_id, str) else None
        return None if data is None else orjson.loads(data)
