"""A stand-in engine with a real template and tokenizer, of 30 tokens, that samples what the test says.

The tokenizer takes the longest token at each place, as BPE mostly does: `10` is one token of a prompt,
while a model may well sample `1` and `0`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.support.standin_engine import Behaviour, StandinEngine

TEXTS = [
    "1",
    "0",
    "10",
    "a",
    "b",
    "ab",
    "c",
    "\n",
    "user",
    "assistant",
    "tool",
    "<",
    "|",
    "end",
    "|>",
    ">",
    " ",
]
TEXTS += ["1a", "\n\n", "é", "\ufffd"]
IDS = {text: 100 + i for i, text in enumerate(TEXTS)}
START, END, CALL = 1, 2, 3
SPECIAL = {"<|start|>": START, "<|end|>": END}
ADDED = {"<call>": CALL}
FIRST_HALF, SECOND_HALF = 90, 91
"""The two bytes of é as tokens of their own."""


def write_tokenizer(folder: Path) -> Path:
    """The `tokenizer.json` that says the same: byte-level BPE."""
    letters = {" ": "Ġ", "\n": "Ċ", "é": "Ã©", "\ufffd": "ï¿½"}
    names = {token: "".join(letters.get(c, c) for c in text) for text, token in IDS.items()}
    names |= {FIRST_HALF: "Ã", SECOND_HALF: "©"}
    added = [{"id": i, "content": c, "special": c in SPECIAL} for c, i in (SPECIAL | ADDED).items()]
    folder.mkdir(exist_ok=True)
    data = {
        "model": {"type": "BPE", "vocab": {name: token for token, name in names.items()}},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": added,
    }
    (folder / "tokenizer.json").write_bytes(orjson.dumps(data))
    return folder


def tokenize(text: str) -> list[int]:
    """Special and added tokens wherever they are spelt, else the longest token that fits."""
    ids: list[int] = []
    known = SPECIAL | ADDED | IDS
    while text:
        found = max((t for t in known if text.startswith(t)), key=len)
        ids.append(known[found])
        text = text[len(found) :]
    return ids


def detokenize(ids: list[int]) -> str:
    """Without special tokens; broken characters as U+FFFD."""
    data = {token: text.encode() for text, token in (IDS | ADDED).items()}
    data |= {FIRST_HALF: b"\xc3", SECOND_HALF: b"\xa9", START: b"", END: b""}
    return b"".join(data[token] for token in ids).decode("utf-8", "replace")


def template(messages: list[dict[str, Any]]) -> str:
    """ChatML; like many templates it trims what an assistant said."""
    text = ""
    for message in messages:
        content = message.get("content") or ""
        content = content.strip() if message["role"] == "assistant" else content
        text += f"<|start|>{message['role']}\n{content}<|end|>\n"
    return text + "<|start|>assistant\n"


class DriftingEngine(StandinEngine):
    """Samples the lists of `outputs` one after the other."""

    def __init__(self, root: Path | None, max_model_len: int = 1000) -> None:
        super().__init__(Behaviour())
        self.root, self.max_model_len = root, max_model_len
        self.outputs: list[list[int]] = []
        self.features: dict[str, Any] | None = None

    async def _models(self, _request: web.Request) -> web.Response:
        cards: list[dict[str, Any]] = [{"id": "tiny", "parent": None, "max_model_len": self.max_model_len}]
        if self.root is not None:
            cards[0]["root"] = str(self.root)
        cards += [{"id": name, "parent": "tiny", "root": "/none"} for name in self.behaviour.adapters]
        return web.json_response({"object": "list", "data": cards})

    def _made(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        rendered = self._rendered(body, ids)
        room = self.max_model_len - len(ids)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or room
        rendered["sampling_params"]["max_tokens"] = min(asked, room)
        return rendered | {"features": self.features}

    async def _render_chat(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return self._model_error(body) or web.json_response(
            self._made(body, tokenize(template(body["messages"])))
        )

    async def _render_completion(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        prompt = body["prompt"]
        return web.json_response([self._made(body, prompt if isinstance(prompt, list) else tokenize(prompt))])

    def _sampled(self, body: dict[str, Any]) -> tuple[list[int], str]:
        ids = self.outputs.pop(0)
        assert len(body["token_ids"]) + body["sampling_params"]["max_tokens"] <= self.max_model_len
        return ids, "stop" if ids[-1] == END else "length"

    def _text(self, token_ids: list[int]) -> str:
        return detokenize(token_ids)
