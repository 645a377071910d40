"""The byte tables of the models behind the engines, each looked up once, on first use."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from insitu.errors import InsituError
from insitu.gateway.engines.upstream import Engine, ServedModel
from insitu.gateway.sampled_ids.pieces import NoPieces, Pieces, find_tokenizer, load_pieces
from insitu.gateway.shared.faults import Fault

_log = logging.getLogger(__name__)
_MAX_KNOWN = 1024  # adapters have a name for each step


@dataclass(frozen=True, slots=True)
class Served:
    """A served model: the bytes of its tokens and its maximum length."""

    pieces: Pieces | None
    max_model_len: int | None


class Tokenizers:
    """Asks an engine where its model is and reads the tokenizer there; nothing is downloaded."""

    def __init__(self, folder: Path | None = None) -> None:
        self.states: dict[str, str] = {}
        """By base model: `ok`, or why its ids cannot be compared."""
        self._folder = folder
        self._known: dict[tuple[str, str], Served] = {}
        self._by_root: dict[str, Pieces | None] = {}
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By engine: one that hangs must not keep calls to the others waiting."""
        self._loading = asyncio.Lock()

    async def of(self, engine: Engine, engine_model: str) -> Served:
        """Look up a model; its `pieces` are None if it has no readable tokenizer, which is logged once."""
        key = (engine.url, engine_model)
        if key in self._known:
            return self._known[key]
        async with self._asking[engine.url]:  # bounded: one request with its deadline, one file
            if key not in self._known:
                try:
                    models = {model.name: model for model in await engine.models()}
                except (Fault, InsituError) as error:
                    _log.warning("%s does not list its models: %s", engine.url, error)
                    return Served(None, None)  # asked again at the next call
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[key] = await self._look_up(models, engine_model)
            return self._known[key]

    async def _look_up(self, models: dict[str, ServedModel], engine_model: str) -> Served:
        asked = models.get(engine_model)
        name = (asked and asked.parent) or engine_model  # an adapter has its base's tokenizer
        base = models.get(name)
        root = str(self._folder or (base and base.root) or "")
        async with self._loading:  # bounded: one file
            if root not in self._by_root:
                self._by_root[root] = await self._load(name, root)
        return Served(self._by_root[root], base.max_model_len if base else None)

    async def _load(self, base: str, root: str) -> Pieces | None:
        try:
            folder = await asyncio.to_thread(find_tokenizer, root) if root else None
            if folder is None:
                raise NoPieces("its tokenizer.json is not on this machine")
            pieces = await asyncio.to_thread(load_pieces, folder)
        except NoPieces as why:
            self.states[base] = f"off: {why}"
            _log.warning(
                "model `%s` (%s): sampled ids are not restored where a prompt is tokenised differently: %s",
                *(base, root or "the engine does not say where it is", why),
            )
            return None
        self.states[base] = "ok"
        _log.info("model `%s`: token bytes read from %s", base, folder)
        return pieces
