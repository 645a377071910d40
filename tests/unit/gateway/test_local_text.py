"""Answers are decoded here once the table agrees with the engine, and by the engine again at a difference."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from insitu.gateway.engines.upstream import Engine, ServedModel
from insitu.gateway.sampled_ids.pieces import load_pieces
from insitu.gateway.sampled_ids.tokenizers import Tokenizers
from insitu.gateway.shared.counts import Counts
from insitu.gateway.texts import local_text
from insitu.gateway.texts.local_text import Spelling
from tests.unit.gateway.conftest import API, GatewayUnderTest, StartGateway
from tests.unit.gateway.drifting_engine import (
    CALL,
    END,
    FIRST_HALF,
    IDS,
    SECOND_HALF,
    START,
    DriftingEngine,
    write_tokenizer,
)

pytestmark = pytest.mark.timeout(60)
DERENDER = {
    "chat": "/v1/chat/completions/derender",
    "completions": "/v1/completions/derender",
}
ANSWER = [IDS["1"], IDS["0"], CALL, IDS["ab"], END]
TEXT = "10<call>ab"
ENDED = 'insitu_gateway_shortcuts_ended_total{shortcut="decoding"}'


def spelling_of(folder: Path) -> Spelling:
    spelling = load_pieces(write_tokenizer(folder)).spelling
    assert spelling is not None
    return spelling


def pieces_said(spelling: Spelling, *parts: Sequence[int], unseen: dict[int, bool]) -> list[str]:
    text = spelling.start([IDS["a"]], Counts(), "call")
    assert text is not None
    return [text.feed(part, unseen) for part in parts]


def test_a_character_goes_out_when_its_last_byte_came_and_half_of_one_never(tmp_path: Path) -> None:
    spelling = spelling_of(tmp_path)
    whole = pieces_said(spelling, [IDS["a"], FIRST_HALF], [SECOND_HALF, IDS["b"]], [FIRST_HALF], unseen={})
    assert whole == ["a", "éb", ""]
    broken = pieces_said(
        spelling, [FIRST_HALF], [IDS["a"]], [SECOND_HALF, IDS["\ufffd"]], [IDS["b"]], unseen={}
    )
    assert broken == ["", "\ufffda", "", "\ufffd\ufffdb"]


def test_special_tokens_are_omitted_or_spelt_out_as_the_engine_says(tmp_path: Path) -> None:
    spelling = spelling_of(tmp_path)
    text = spelling.start([], Counts(), "call")
    assert text is not None
    assert text.unsure([IDS["a"], START, CALL, FIRST_HALF, 7, 10**6]) == [START, 7, 10**6]
    said = pieces_said(
        spelling, [START, FIRST_HALF, END, SECOND_HALF, 7], unseen={START: False, END: True, 7: True}
    )
    assert said == ["<|start|>é"]


def test_a_prompt_that_ends_inside_a_character_is_left_to_the_engine(tmp_path: Path) -> None:
    spelling = spelling_of(tmp_path)
    assert spelling.start([IDS["a"], FIRST_HALF, END], Counts(), "call") is None
    assert spelling.start([FIRST_HALF, IDS["a"], END], Counts(), "call") is not None


def test_only_a_tokenizer_that_decodes_by_bytes_alone_has_a_spelling(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    data = orjson.loads((folder / "tokenizer.json").read_bytes())
    parts = [{"type": "ByteLevel"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    data["decoder"] = {"type": "Sequence", "decoders": parts}
    (folder / "tokenizer.json").write_bytes(orjson.dumps(data))
    assert load_pieces(folder).spelling is None


class Talker:
    """Calls of one protocol, whole or streamed, that all get the same tokens."""

    def __init__(self, gateway: GatewayUnderTest, protocol: str, *, stream: bool) -> None:
        self.gateway, self.protocol, self.stream = gateway, protocol, stream

    @property
    def engine(self) -> DriftingEngine:
        assert isinstance(self.gateway.engine, DriftingEngine)
        return self.gateway.engine

    async def say(self, **options: Any) -> str:
        self.engine.outputs.append(list(ANSWER))
        chat = self.protocol == "chat"
        path = "/v1/chat/completions" if chat else "/v1/completions"
        asked = {"messages": [{"role": "user", "content": "ab"}]} if chat else {"prompt": "ab10"}
        body = {"model": "tiny", "stream": self.stream, **asked, **options}
        async with self.gateway.session.post(self.gateway.url + path, json=body, headers=API) as got:
            data = await got.read()
        assert got.status == 200, data
        if not self.stream:
            choice = orjson.loads(data)["choices"][0]
            return choice["message"]["content"] if chat else choice["text"]
        events = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
        choices = [orjson.loads(event)["choices"][0] for event in events if event != b"[DONE]"]
        return "".join((c["delta"].get("content") or "") if chat else c["text"] for c in choices)

    def num_asked(self) -> int:
        """Count the answers, and parts of answers, that the engine decoded; not single special tokens."""
        return sum(
            len(body.get("generate_chunk", {}).get("choices", [1])) == 1
            for body in self.engine.calls_to(DERENDER[self.protocol])
            if body.get("prompt_tokens") != [1]
        )


def with_root(folder: Path) -> DriftingEngine:
    return DriftingEngine(write_tokenizer(folder))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "completions"])
async def test_the_engine_is_not_asked_for_text_once_it_agreed(
    start_gateway: StartGateway, tmp_path: Path, protocol: str, stream: bool
) -> None:
    gateway = await start_gateway(make_engine=lambda: with_root(tmp_path))
    talker = Talker(gateway, protocol, stream=stream)
    for _ in range(local_text._COMPARED_FIRST):
        before = talker.num_asked()
        assert await talker.say() == TEXT
        assert talker.num_asked() > before, "compared"
    before = talker.num_asked()
    for _ in range(5):
        assert await talker.say() == TEXT
    assert talker.num_asked() == before
    assert await talker.say(logprobs=True if protocol == "chat" else 1) == TEXT
    assert talker.num_asked() > before, "only the engine names the tokens of logprobs"
    before = talker.num_asked()
    await talker.say(skip_special_tokens=False)
    assert talker.num_asked() > before


class OtherText(DriftingEngine):
    """Decodes differently from the tokenizer beside it."""

    def _text(self, token_ids: list[int]) -> str:
        return super()._text(token_ids).upper()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "completions"])
async def test_a_difference_ends_local_decoding_once_and_for_all(
    start_gateway: StartGateway,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    stream: bool,
) -> None:
    gateway = await start_gateway(make_engine=lambda: OtherText(write_tokenizer(tmp_path)))
    talker = Talker(gateway, protocol, stream=stream)
    with caplog.at_level(logging.ERROR, logger=local_text.__name__):
        for _ in range(local_text._COMPARED_FIRST + 3):
            before = talker.num_asked()
            assert await talker.say() == TEXT.upper(), "the engine's text is the answer"
            assert talker.num_asked() > before
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    assert "'call>ab'" in caplog.text
    async with gateway.session.get(gateway.url + "/metrics", headers=API) as got:
        assert f"{ENDED} 1\n" in await got.text()


async def test_a_parser_sees_every_answer(start_gateway: StartGateway, tmp_path: Path) -> None:
    engine = with_root(tmp_path)
    engine.behaviour.parser = True
    gateway = await start_gateway(make_engine=lambda: engine)
    talker = Talker(gateway, "chat", stream=False)
    for _ in range(local_text._COMPARED_FIRST + 2):
        before = talker.num_asked()
        await talker.say()
        assert talker.num_asked() > before


async def test_an_engine_without_a_tokenizer_here_decodes_everything(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(make_engine=lambda: DriftingEngine(None))
    talker = Talker(gateway, "chat", stream=False)
    for _ in range(local_text._COMPARED_FIRST + 2):
        before = talker.num_asked()
        assert await talker.say() == TEXT
        assert talker.num_asked() > before


class Listing:
    """An engine that lists its model, once it may."""

    def __init__(self, url: str, root: Path, *, hangs: bool) -> None:
        self.url, self._root, self._may = url, root, asyncio.Event()
        if not hangs:
            self._may.set()

    async def models(self) -> list[ServedModel]:
        await self._may.wait()
        return [ServedModel("tiny", None, str(self._root), 100)]


async def test_an_engine_that_hangs_keeps_no_call_to_another_waiting(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizers = Tokenizers()
    hung = asyncio.create_task(tokenizers.of(cast(Engine, Listing("a", tmp_path, hangs=True)), "tiny"))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        served = await tokenizers.of(cast(Engine, Listing("b", tmp_path, hangs=False)), "tiny")
    assert served.pieces is not None
    hung.cancel()
