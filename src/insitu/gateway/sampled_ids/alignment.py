"""Align two lists of token ids over the same text: find where their tokens begin and end together.

    recorded   |As|k| 1|0|<end>|\n|          what went through the engine
    rendered   |As|k| 10  |<end>|\n|Next|    what the template and the tokenizer make of the same conversation

Ids are compared first, in blocks; bytes are compared only where ids differ, token by token, until both
sides meet again. Tokens without bytes (special ones) match as ids or not at all.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass

from insitu.gateway.sampled_ids.pieces import Pieces

_BLOCKS = (4096, 256, 16, 1)


@dataclass(frozen=True, slots=True)
class Alignment:
    """The part of the recorded text that the rendered text follows."""

    stretches: list[tuple[int, int, int]]
    """(recorded index, rendered index, number of equal ids), each starting where both sides meet."""
    num_covered: int
    """Leading recorded tokens whose whole text the rendered ids have too."""
    ran_out: bool
    """The rendered text ended before the recorded one."""

    def rendered_index(self, num_recorded: int) -> int | None:
        """Count the rendered ids with the exact text of `num_recorded` recorded ids; None inside a token."""
        start, other, length = self._stretch(num_recorded)
        return other + num_recorded - start if num_recorded <= start + length else None

    def rendered_before(self, num_recorded: int) -> int:
        """Count the rendered ids that certainly lie within the text of `num_recorded` recorded ids."""
        start, other, length = self._stretch(num_recorded)
        return other + min(num_recorded - start, length)

    def _stretch(self, num_recorded: int) -> tuple[int, int, int]:
        return self.stretches[bisect_right(self.stretches, num_recorded, key=lambda s: s[0]) - 1]


def align(recorded: array[int], rendered: array[int], pieces: Pieces) -> Alignment:
    """Align the recorded ids with the rendered ones as far as their text is the same."""
    i = j = 0
    stretches: list[tuple[int, int, int]] = []
    while True:
        length = _num_equal(recorded, i, rendered, j)
        stretches.append((i, j, length))
        i, j, together = _meet_again(recorded, i + length, rendered, j + length, pieces)
        if not together:
            return Alignment(stretches, i, ran_out=i < len(recorded) and j == len(rendered))


def _num_equal(left: array[int], i: int, right: array[int], j: int) -> int:
    """Count the equal ids from `left[i]` and `right[j]` on."""
    most, done = min(len(left) - i, len(right) - j), 0
    for size in _BLOCKS:
        while done + size <= most and left[i + done : i + done + size] == right[j + done : j + done + size]:
            done += size
    return done


def _meet_again(
    recorded: array[int], i: int, rendered: array[int], j: int, pieces: Pieces
) -> tuple[int, int, bool]:
    """Advance by bytes until a token ends on both sides at once; False if that does not happen."""
    left: bytes | None = b""
    right: bytes | None = b""
    while True:
        if not left:
            left = pieces[recorded[i]] if i < len(recorded) else None
        if not right:
            right = pieces[rendered[j]] if j < len(rendered) else None
        if left is None or right is None:
            return i, j, False
        length = min(len(left), len(right))
        if left[:length] != right[:length]:
            return i, j, False
        left, right = left[length:], right[length:]
        i, j = i + (not left), j + (not right)
        if not left and not right:
            return i, j, True
