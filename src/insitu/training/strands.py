"""The tokens of a rollout's calls, each stored token copied and hashed once.

A call is stored as what follows its parent's tokens, so a conversation is one growing array, a *strand*:
each call appends to it, and a call's prompt is a view of its beginning. Only where two calls continue the
same one does the second start from a copy.

Every prefix of a strand has a hash, so whether a prompt starts with the tokens of another call is known
without reading either again; equal hashes are confirmed by comparing the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InvalidRequest
from insitu.records.call_tokens import CallTokens

_BASE = np.uint64(0x9E3779B97F4A7C15)
_FIRST_ROOM = 1024


class Strand:
    """Token ids that grow at the end, with a hash of every prefix."""

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_ROOM, np.int32)
        self._hashes = np.zeros(_FIRST_ROOM + 1, np.uint64)
        self.length = 0

    def append(self, ids: NDArray[np.int32]) -> None:
        start, stop = self.length, self.length + len(ids)
        if stop > len(self._ids):
            self._grow(max(stop, 2 * len(self._ids)))
        self._ids[start:stop] = ids
        # Arithmetic wraps around, which is what makes it a hash.
        terms = (ids.astype(np.uint64) + np.uint64(1)) * _powers(stop)[start:stop]
        np.cumsum(terms, out=terms)
        self._hashes[start + 1 : stop + 1] = self._hashes[start] + terms
        self.length = stop

    def branch(self, length: int) -> Strand:
        """Return a new strand that starts with the first tokens of this one."""
        other = Strand()
        other._ids, other._hashes, other.length = self._ids, self._hashes, length
        other._grow(max(_FIRST_ROOM, length))
        return other

    def _grow(self, room: int) -> None:
        """Move to new arrays with room for this many tokens."""
        ids, hashes = np.empty(room, np.int32), np.zeros(room + 1, np.uint64)
        ids[: self.length] = self._ids[: self.length]
        hashes[: self.length + 1] = self._hashes[: self.length + 1]
        self._ids, self._hashes = ids, hashes

    def ids(self, length: int) -> NDArray[np.int32]:
        """Return a view of the first tokens."""
        return self._ids[:length]

    def hashes(self, lengths: NDArray[np.int64]) -> list[int]:
        """Return the hash of each prefix."""
        return self._hashes[lengths].tolist()

    def hash(self, length: int) -> int:
        return int(self._hashes[length])


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a call's tokens: the prompt is the first `num_prompt` of a strand, the answer ends at
    `end`."""

    strand: Strand
    num_prompt: int
    end: int

    def starts_with(self, other: Place) -> bool:
        """Return True if this prompt starts with all tokens of the other call."""
        if other.end > self.num_prompt:
            return False
        if self.strand is other.strand:
            return True
        return np.array_equal(self.strand.ids(other.end), other.strand.ids(other.end))


class Strands:
    """Places the calls of one rollout; `stored` also has the calls that they are stored against."""

    def __init__(self, stored: Mapping[str, CallTokens]) -> None:
        self._stored = stored
        self._places: dict[str, Place] = {}

    def place(self, call: CallTokens) -> Place:
        """Return the place of a call's tokens; calls before it are placed first."""
        waiting = [call]
        while waiting[-1].id not in self._places and waiting[-1].parent_id is not None:
            waiting.append(self._stored[waiting[-1].parent_id])
        for each in reversed(waiting):
            if each.id not in self._places:
                self._places[each.id] = self._placed(each)
        return self._places[call.id]

    def _placed(self, call: CallTokens) -> Place:
        strand = Strand() if call.parent_id is None else self._after(call, self._places[call.parent_id])
        strand.append(ids_of(call.prompt_ids))
        num_prompt = strand.length
        strand.append(ids_of(call.output_ids))
        return Place(strand, num_prompt, strand.length)

    def _after(self, call: CallTokens, parent: Place) -> Strand:
        if parent.end != call.num_shared:
            raise InvalidRequest(
                f"call {call.id} is stored after {call.num_shared} tokens of call {call.parent_id}, "
                f"which has {parent.end}",
                hint="the record store is damaged: upload rollouts without this call",
            )
        strand = parent.strand
        return strand if strand.length == parent.end else strand.branch(parent.end)


def ids_of(packed: bytes) -> NDArray[np.int32]:
    """Return packed ids as an array, without a copy."""
    return np.frombuffer(packed, "<i4")


def floats_of(packed: bytes) -> NDArray[np.float32]:
    """Return packed floats as an array, without a copy."""
    return np.frombuffer(packed, "<f4")


_known_powers = np.ones(1, np.uint64)


def _powers(count: int) -> NDArray[np.uint64]:
    """Return at least this many powers of the base; computed once for the longest strand so far."""
    global _known_powers
    if len(_known_powers) < count:
        factors = np.full(max(count, 2 * len(_known_powers)), _BASE)
        factors[0] = 1
        _known_powers = np.cumprod(factors)
    return _known_powers
