"""Tokens as text for people: one piece each, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.cli.gateway import gateway as command
from insitu.gateway.process import settings_from
from insitu.gateway.sampled_ids.pieces import Pieces
from insitu.gateway.sampled_ids.token_texts import token_texts
from insitu.gateway_client import GatewayClient
from tests.unit.gateway.conftest import StartGateway
from tests.unit.gateway.drifting_engine import (
    END,
    FIRST_HALF,
    IDS,
    SECOND_HALF,
    DriftingEngine,
    write_tokenizer,
)

pytestmark = pytest.mark.timeout(60)
CHAT = "/rollouts/ro/v1/chat/completions"
ASKED = [{"role": "user", "content": "1"}]


def test_characters_of_several_tokens_and_special_ones() -> None:
    pieces = Pieces({0: b"a", 1: b"\xc3", 2: b"\xa9"}, {3: "<|end|>"})
    assert token_texts(pieces, [0, 1, 2, 3]) == ["a", "", "é", "<|end|>"]
    assert token_texts(pieces, [1, 3, 1]) == ["", "�<|end|>", "�"]
    assert token_texts(pieces, [0, 9]) == ["a", "<9>"]
    assert token_texts(pieces, []) == []


async def test_a_list_with_pieces(start_gateway: StartGateway, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    gateway = await start_gateway(make_engine=lambda: DriftingEngine(tmp_path))
    gateway.engine.outputs = [[IDS["1"], FIRST_HALF, SECOND_HALF, END], [IDS["1"], END]]
    for model in ("tiny", "run"):
        await gateway.post(CHAT, model=model, messages=ASKED)
    async with GatewayClient(gateway.url, "default") as client:
        record = await client.rollout_record("ro", tokens=False, pieces=True)
        plain = await client.rollout_record("ro")
    assert [call["output_pieces"] for call in record.calls] == [["1", "", "é", "<|end|>"], ["1", "<|end|>"]]
    assert record.calls[0]["prompt_text"] == "<|start|>user\n1<|end|>\n<|start|>assistant\n"
    assert "output_ids" not in record.calls[0]
    assert "output_pieces" not in plain.calls[0]


async def test_without_a_tokenizer_there_are_none(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(make_engine=lambda: DriftingEngine(None))
    gateway.engine.outputs = [[IDS["1"], END]]
    await gateway.post(CHAT, messages=ASKED)
    async with GatewayClient(gateway.url, "default") as client:
        (call,) = (await client.rollout_record("ro", pieces=True)).calls
    assert (call["output_pieces"], call["prompt_text"], call["output_ids"]) == (None, None, [IDS["1"], END])


def test_the_command_passes_the_tokenizer_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr("insitu.gateway.process.main", given.append)
    arguments = ["--upstream", "http://127.0.0.1:1", "--tokenizer", str(tmp_path)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert settings_from(given[0]).tokenizer == tmp_path
    assert CliRunner().invoke(command, [*arguments[:-1], str(tmp_path / "none")]).exit_code == 2
