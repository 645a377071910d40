"""Recorded tokens as text, one piece per token: for display, never to be tokenised again."""

from __future__ import annotations

import asyncio
import codecs
import logging
from collections.abc import Iterator, Sequence

from insitu.errors import NotFound
from insitu.gateway.engines.replicas import ReplicaPool
from insitu.gateway.engines.routes import Routes, Target
from insitu.gateway.sampled_ids.pieces import Pieces
from insitu.gateway.sampled_ids.tokenizers import Tokenizers
from insitu.types import ModelCall

_log = logging.getLogger(__name__)
_LOOKUP_SECONDS = 10.0


def token_texts(pieces: Pieces, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined, they are the whole text.

    A character of several tokens goes to the last of them. Special tokens appear by name, ids that the
    tokenizer does not list by number.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for token in ids:
        data = pieces[token]
        if data is not None:
            texts.append(decoder.decode(data))
        else:
            texts.append(decoder.decode(b"", final=True) + (pieces.name(token) or f"<{token}>"))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


class TokenTexts:
    """Finds the tokenizer of recorded calls, as far as their models are still served."""

    def __init__(self, routes: Routes, pool: ReplicaPool, tokenizers: Tokenizers) -> None:
        self._routes, self._pool, self._tokenizers = routes, pool, tokenizers

    async def pieces_of(self, call: ModelCall) -> Pieces | None:
        """Return the bytes of a call's tokens; None if its model or tokenizer is not known here."""
        replica = self._pool.choose(None)
        if replica is None:
            return None
        for target in self._targets(call):
            try:
                async with asyncio.timeout(_LOOKUP_SECONDS):
                    served = await self._tokenizers.of(replica.engine, target.engine_model)
            except TimeoutError:
                _log.warning("%s does not list its models in time", replica.id)
                return None
            if served.pieces is not None:
                return served.pieces
        return None

    def _targets(self, call: ModelCall) -> Iterator[Target]:
        """Yield candidates for the tokenizer: the call's model, a newer step of its run, the run's base."""
        table = self._routes.table
        if table is None:
            return
        for name in (call.model, call.run):
            try:
                if name is not None:
                    yield table.resolve(name)
            except NotFound:
                continue
        if call.run is not None and table.base is not None:
            yield table.base
