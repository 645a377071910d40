"""TokenNames: the text of token ids, from the tokenizer.json of the run's base model; for display only."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from insitu.gateway.sampled_ids.pieces import NoPieces, Pieces, find_tokenizer, load_pieces
from insitu.gateway.sampled_ids.token_texts import token_texts
from insitu.wire.views.runs import TextsView


class TokenNames:
    """Looks the tokenizer up on first use. Nothing is downloaded."""

    def __init__(self, base_model: str, folder: Path | None = None) -> None:
        self._base_model = base_model
        self._folder = folder
        self._lock = threading.Lock()
        self._found: tuple[Pieces | None, str] | None = None

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None if the tokenizer is not known here."""
        pieces = self._look_up()[0]
        return None if pieces is None else token_texts(pieces, ids)

    def view(self) -> TextsView:
        """Return where the texts are from, or why there are none."""
        pieces, source = self._look_up()
        return TextsView(pieces is not None, source)

    def _look_up(self) -> tuple[Pieces | None, str]:
        with self._lock:
            if self._found is None:
                self._found = self._load()
            return self._found

    def _load(self) -> tuple[Pieces | None, str]:
        folder = self._folder or (find_tokenizer(self._base_model) if self._base_model else None)
        hint = "name the directory of its tokenizer.json with --tokenizer"
        if folder is None:
            return None, f"the tokenizer of {self._base_model or 'the model'} is not on this machine: {hint}"
        try:
            return load_pieces(folder), str(folder)
        except NoPieces as why:
            return None, f"{folder}: {why}: {hint}"
