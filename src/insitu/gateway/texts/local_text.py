"""The text of sampled tokens without a request to the engine, and the cross-check of this shortcut.

    ids ──► derender by the engine ──► text          the first calls and every 100th: both, compared
        └─► table of the tokenizer ──► text          all others: the table alone

Tokens of a byte-level tokenizer are bytes, and text is their concatenation. The engine holds text back while
it ends inside a character, and drops what is still held at the end; so does this. Special tokens may
be omitted or spelt out, which only the engine knows: it is asked once for each. At the first difference the
engine decodes everything again, for good.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile

from insitu.gateway.shared.counts import Counts

_log = logging.getLogger(__name__)
_COMPARED_FIRST = 8
_COMPARED_EVERY = 100
_PROMPT_TAIL = 7
"""Tokens of the prompt that the engine's own decoder starts with."""
_SHOWN_CHARS = 80
_BROKEN = "\ufffd"


class Spelling:
    """The text of every token of one tokenizer, and whether it has ever differed from the engine's."""

    def __init__(self, data: dict[int, bytes], special: set[int]) -> None:
        """`data` has the bytes of all tokens; the `special` ones may be omitted from a text."""
        self.texts: list[str | bytes | None] = [None] * (max(data, default=-1) + 1)
        """By token: its text, its bytes if they are only a part of a character, None to ask the engine."""
        self.special = {token: data[token] for token in special & data.keys()}
        self.differed = False
        self._num_started = 0
        for token, one in data.items():
            if token not in special:
                text = one.decode("utf-8", "replace")
                self.texts[token] = one if text.endswith(_BROKEN) or text.encode() != one else text

    def start(
        self, prompt_ids: Sequence[int], counts: Counts, call_id: str, *, spells_special: bool = False
    ) -> LocalText | None:
        """Begin an answer; None if the engine must decode it.

        `spells_special`: special tokens are part of the text, as for the parsers of an engine.
        """
        if self.differed or not self._ends_cleanly(prompt_ids[-_PROMPT_TAIL:]):
            return None
        number, self._num_started = self._num_started, self._num_started + 1
        alone = number >= _COMPARED_FIRST and number % _COMPARED_EVERY != 0
        return LocalText(self, counts, call_id, alone=alone, spells_special=spells_special)

    def some_ids(self, parts: Sequence[str]) -> list[int] | None:
        """Return tokens of a text, not those that a model would choose; None if there are none.

        Each part is one token if there is such a token, else one for each byte.
        """
        tokens = {text.encode() if isinstance(text, str) else text: t for t, text in enumerate(self.texts)}
        tokens |= {data: token for token, data in self.special.items()}
        found = [
            tokens.get(piece)
            for part in parts
            for piece in ([part.encode()] if part.encode() in tokens else [bytes([b]) for b in part.encode()])
        ]
        return None if None in found else [token for token in found if token is not None]

    def of(self, token: int) -> str | bytes | None:
        return self.texts[token] if 0 <= token < len(self.texts) else None

    def _ends_cleanly(self, ids: Sequence[int]) -> bool:
        """Return True unless a character may begin in the prompt and end in the answer."""
        last = next((text for token in reversed(ids) if (text := self.of(token)) is not None), "")
        return isinstance(last, str)


class LocalText:
    """The text of one answer as its tokens arrive."""

    def __init__(
        self, spelling: Spelling, counts: Counts, call_id: str, *, alone: bool, spells_special: bool
    ) -> None:
        self.alone = alone
        """False if the engine decodes the answer too, to compare."""
        self._spelling, self._counts, self._call_id = spelling, counts, call_id
        self._spells_special = spells_special
        self._held = b""

    def unsure(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens whose text only the engine knows."""
        if self._spells_special:
            return []
        return [token for token in ids if self._spelling.of(token) is None]

    def feed(self, ids: Sequence[int], unseen: Mapping[int, bool]) -> str:
        """Return the text that these tokens complete; `unseen` tells which special ones have no text."""
        parts: list[str] = []
        for token in ids:
            one = self._spelling.of(token)
            if one is None:
                omitted = not self._spells_special and unseen[token]
                one = b"" if omitted else self._spelling.special.get(token, b"")
            if isinstance(one, str):
                if not self._held:
                    parts.append(one)
                    continue
                one = one.encode()
            self._held += one
            text = self._held.decode("utf-8", "replace")
            if text and not text.endswith(_BROKEN):
                parts.append(text)
                self._held = b""
        return "".join(parts)

    def compare(self, own: str, said: str) -> None:
        """Compare the whole answer with the engine's; stop using the shortcut if they differ."""
        if own == said or self._spelling.differed:
            return
        self._spelling.differed = True
        self._counts.shortcuts_ended["decoding"] += 1
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, said, strict=False)))
        _log.error(
            "call %s: the gateway reads %r where the engine reads %r, at character %d; from now on the "
            "engine reads every answer",
            *(self._call_id, own[at : at + _SHOWN_CHARS], said[at : at + _SHOWN_CHARS], at),
        )
