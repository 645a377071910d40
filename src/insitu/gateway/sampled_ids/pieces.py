"""The bytes behind every token id, read from a model's `tokenizer.json`.

Tokens cannot be compared by their decoded text: half a character decodes to U+FFFD, whichever half it is.
So each id is mapped to its bytes, once, for the two families whose text is the concatenation of their
tokens' bytes: byte-level BPE (GPT-2, Llama 3, Qwen …) and SentencePiece style (`▁`, `<0xXX>`). Ids without
bytes of their own (special tokens, the unknown token, ids that the file does not list) map to None: they
equal only themselves, so a marker that was spelt out is never mistaken for the marker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Required, TypedDict, cast

import orjson

from insitu.gateway.texts.local_text import Spelling
from insitu.json_values import JsonObject, JsonValue, as_list, as_object

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")


class _Added(TypedDict, total=False):
    """An added token, in `tokenizer.json` or in `tokenizer_config.json`."""

    id: Required[int]
    content: Required[str]
    special: bool


class _Model(TypedDict, total=False):
    """The model of a `tokenizer.json`."""

    vocab: Required[dict[str, int] | list[tuple[str, float]]]
    """Ids by token; Unigram: pairs of token and score, in the order of ids."""
    unk_token: str | None
    unk_id: int | None


class _TokenizerFile(TypedDict, total=False):
    """The parts of a `tokenizer.json` that are read. Not validated: `load_pieces` reports a wrong one."""

    model: Required[_Model]
    decoder: JsonObject | None
    added_tokens: list[_Added] | None


class NoPieces(Exception):
    """The bytes of a model's tokens are not known; the message says why."""


class Pieces:
    """Bytes by token id; None for ids that must match as ids."""

    def __init__(
        self, texts: dict[int, bytes], names: dict[int, str] | None = None, spelling: Spelling | None = None
    ) -> None:
        self.spelling = spelling
        """The text of the tokens as the engine decodes it; None if it takes more than their bytes."""
        self._names = names or {}
        self._texts: list[bytes | None] = [None] * (max(texts, default=-1) + 1)
        for token, text in texts.items():
            self._texts[token] = text or None

    def __getitem__(self, token: int) -> bytes | None:
        return self._texts[token] if 0 <= token < len(self._texts) else None

    def name(self, token: int) -> str | None:
        """Return the tokenizer's name for an id that has no bytes."""
        return self._names.get(token)


def find_tokenizer(root: str) -> Path | None:
    """Find the directory of a model's `tokenizer.json`, its own or one in the local hub cache, or None."""
    folder = Path(root)
    if not folder.is_dir() and _REPO.fullmatch(root):
        repo = _hub_cache() / f"models--{root.replace('/', '--')}"
        revision = repo / "refs" / "main"
        if not revision.is_file():
            return None
        folder = repo / "snapshots" / revision.read_text().strip()
    return folder if (folder / _TOKENIZER).is_file() else None


def load_pieces(folder: Path) -> Pieces:
    """Load the table of the tokenizer in `folder`; NoPieces says why there is none."""
    try:
        tokenizer = cast(_TokenizerFile, orjson.loads((folder / _TOKENIZER).read_bytes()))
        config: JsonObject = {}
        if (folder / _CONFIG).is_file():
            config = cast(JsonObject, orjson.loads((folder / _CONFIG).read_bytes()))
        return _pieces(tokenizer, config)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoPieces(f"its tokenizer.json cannot be read ({type(error).__name__}: {error})") from error


def _pieces(tokenizer: _TokenizerFile, config: JsonObject) -> Pieces:
    text_of = _text_of(tokenizer.get("decoder"))
    model = tokenizer["model"]
    vocabulary = dict(_vocabulary(model))
    texts = {token: text for token, name in vocabulary.items() if (text := text_of(name)) is not None}
    names = _special_names(config) | {model.get("unk_token")}
    opaque = {token for token, name in vocabulary.items() if name in names} | {model.get("unk_id")}
    called = dict(vocabulary)
    for added in _added(tokenizer, config):
        token, content = int(added["id"]), str(added["content"])
        called[token] = content
        if added.get("special") or content in names:
            opaque.add(token)
        else:  # an added token stands for its literal content, even in a byte-level vocabulary
            texts[token] = content.replace("▁", " ").encode() if text_of("▁") == b" " else content.encode()
    kept = {token: text for token, text in texts.items() if token not in opaque}
    unnamed = {token: name for token, name in called.items() if token not in kept}
    return Pieces(kept, unnamed, _spelling(tokenizer.get("decoder"), called, {*unnamed}))


def _spelling(decoder: JsonObject | None, called: dict[int, str], special: set[int]) -> Spelling | None:
    """Return the text of a tokenizer that decodes by bytes alone; None if the engine must decode.

    Its decoder does not know which tokens were added: it reads their names like those of all others.
    """
    if [str(part["type"]) for part in _flat(decoder)] != ["ByteLevel"]:
        return None
    data = {t: name.encode() if (one := _byte_level(name)) is None else one for t, name in called.items()}
    if any(data[token].decode("utf-8", "replace").endswith("\ufffd") for token in special & data.keys()):
        return None  # the engine cannot be asked what it makes of a special token that is part of a character
    return Spelling(data, special)


def _text_of(decoder: JsonObject | None) -> Callable[[str], bytes | None]:
    """Return the function by which a tokenizer's decoder turns one token into bytes."""
    decoders = list(_flat(decoder))
    kinds = {str(decoder["type"]) for decoder in decoders}
    if "ByteLevel" in kinds:
        return _byte_level
    spaces = {"pattern": {"String": "▁"}, "content": " "}
    if "Metaspace" in kinds or any(spaces.items() <= decoder.items() for decoder in decoders):
        fallback = "ByteFallback" in kinds
        return lambda name: _sentence_piece(name, fallback)
    raise NoPieces(f"its decoder ({', '.join(sorted(kinds)) or 'none'}) does not join the bytes of tokens")


def _flat(decoder: JsonValue) -> Iterator[JsonObject]:
    """Yield a decoder, or the parts of a sequence of decoders."""
    one = as_object(decoder)
    if one is None:
        return
    if one["type"] == "Sequence":
        for part in as_list(one["decoders"]) or []:
            yield from _flat(part)
    else:
        yield one


def _byte_level(name: str) -> bytes | None:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in name)
    except KeyError:
        return None


def _sentence_piece(name: str, fallback: bool) -> bytes:
    if fallback and (byte := _BYTE.fullmatch(name)):
        return bytes([int(byte[1], 16)])
    return name.replace("▁", " ").encode()


def _vocabulary(model: _Model) -> Iterator[tuple[int, str]]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        for token, pair in enumerate(vocabulary):
            yield token, str(pair[0])
    else:
        for name, token in vocabulary.items():
            yield int(token), name


def _added(tokenizer: _TokenizerFile, config: JsonObject) -> Iterator[_Added]:
    """Yield the added tokens of both files; a token that either calls special is special."""
    yield from tokenizer.get("added_tokens") or []
    decoder = cast("dict[str, _Added]", config.get("added_tokens_decoder") or {})
    for token, added in decoder.items():
        yield {**added, "id": int(token)}


def _special_names(config: JsonObject) -> set[str | None]:
    named = [config.get(key) for key in _SPECIAL_NAMES]
    for key in _SPECIAL_LISTS:
        several = config.get(key)
        named += (as_object(several) or {}).values() or as_list(several) or []
    contents = [name.get("content") if isinstance(name, dict) else name for name in named]
    return {content for content in contents if isinstance(content, str)}


def _hub_cache() -> Path:
    """Return the directory in which Hugging Face's libraries keep downloaded models."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
