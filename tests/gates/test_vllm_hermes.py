"""The gateway's own reading of tool calls against vLLM's hermes parser: the same message from any text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from insitu.gateway.sampled_ids.pieces import load_pieces
from insitu.gateway.texts import hermes
from insitu.gateway.texts.hermes import CLOSE, OPEN, BeforeCalls
from insitu.testing.models import tiny

pytestmark = pytest.mark.timeout(300)
NUM_TEXTS = 3000
TOOLS = [{"type": "function", "function": {"name": hermes.PROBE_TOOL, "parameters": {"type": "object"}}}]
CALLS = [
    f'{OPEN}{{"name": "look", "arguments": {{"at": "it"}}}}{CLOSE}',
    f'{OPEN}\n{{"arguments": {{"é": [1.50, null, "\\u00e9<"]}}, "name": "look"}}\n{CLOSE}',
    f'{OPEN}{{"name": "look", "arguments": "text"}}',
    f'{OPEN}{{"name": 3, "arguments": {{}}}}{CLOSE}',
    f'{OPEN}{{"name": "look"}}{CLOSE}',
    f'{OPEN}{{"name": "look", "arguments": {{"at": NaN}}}}{CLOSE}',
]
PIECES = [
    *CALLS,
    OPEN,
    CLOSE,
    "<",
    "<tool",
    "</tool_call",
    "\n",
    " ",
    "Let me look. ",
    "{}",
    "\u00e9",
    "<think>x</think>",
]


@pytest.fixture(scope="module")
def parsing() -> tuple[Any, Any]:
    """vLLM's parser, made for each text, and the request that it reads."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.tokenizers import get_tokenizer

    tokenizer: Any = get_tokenizer(str(tiny()))
    kind: Any = ParserManager.get_parser("hermes", None, enable_auto_tools=True, tokenizer=tokenizer)
    request = ChatCompletionRequest.model_validate({"messages": [], "tools": TOOLS})
    return lambda: kind(tokenizer, request.tools), request


def some_texts() -> list[str]:
    rng = random.Random(19)
    return ["".join(rng.choices(PIECES, k=rng.randint(0, 5))) for _ in range(NUM_TEXTS)]


def parsed(parsing: tuple[Any, Any], text: str) -> dict[str, Any]:
    """Return the message that vLLM makes of a whole text."""
    parser, request = parsing
    reasoning, content, calls = parser().parse(text, request, enable_auto_tools=True)
    assert reasoning is None
    functions = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls or []]
    return {"content": content, "tool_calls": functions}


def test_a_whole_text_is_read_as_vllm_reads_it(parsing: tuple[Any, Any]) -> None:
    num_calls = num_left = 0
    for text in some_texts():
        message = hermes.message_of(text)
        if message is None:
            num_left += 1
            continue
        num_calls += "tool_calls" in message
        assert hermes.flat(message) == hermes.flat(parsed(parsing, text)), text
    assert num_calls > NUM_TEXTS / 10
    assert 0 < num_left < NUM_TEXTS * 0.8
    print(f"gate vllm-hermes: {num_calls} texts with calls read as vLLM does, {num_left} left to it ok")


def test_content_is_streamed_as_vllm_streams_it(parsing: tuple[Any, Any]) -> None:
    rng = random.Random(20)
    for text in some_texts()[:1000]:
        ends = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, rng.randint(0, 6))))
        chunks = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
        make, request = parsing
        parser, before = make(), BeforeCalls()
        for chunk in chunks:
            delta = parser.parse_delta(chunk, [0], request, prompt_token_ids=[0], finished=False)
            assert before.feed(chunk) == ((delta and delta.content) or ""), (text, chunks)
        assert before.opened == (OPEN in text)


def test_the_probe_tells_hermes_from_other_parsers(parsing: tuple[Any, Any]) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers import get_tokenizer
    from vllm.tool_parsers import ToolParserManager

    text = "".join(hermes.PROBE)
    tokenizer: Any = get_tokenizer(str(tiny()))
    spelling = load_pieces(tiny()).spelling
    assert spelling is not None
    ids = spelling.some_ids(hermes.PROBE)
    assert ids is not None
    assert tokenizer.decode(ids) == text
    expected = hermes.message_of(text)
    assert expected is not None
    assert len(expected["tool_calls"]) == 2
    assert hermes.flat(parsed(parsing, text)) == hermes.flat(expected)

    tools: list[str] = ToolParserManager.list_registered()
    reasoning: list[str] = ReasoningParserManager.list_registered()
    read = {(tool, None): probed(tool, None) for tool in tools}
    read |= {("hermes", name): probed("hermes", name) for name in reasoning}
    same = {
        names for names, message in read.items() if message and hermes.flat(message) == hermes.flat(expected)
    }
    # deepseek_v3 parses reasoning only if a request's arguments for the template say so.
    assert same == {("hermes", None), ("qwen3_json", None), ("hermes", "deepseek_v3")}
    num_read = sum(message is not None for message in read.values())
    assert num_read > len(read) / 2
    print(f"gate vllm-hermes: told from {num_read - len(same)} other parsers by its probe ok")


def probed(tool: str, reasoning: str | None) -> dict[str, Any] | None:
    """Return the message that other parsers make of the probe; None if they need another tokenizer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.tokenizers import get_tokenizer

    tokenizer: Any = get_tokenizer(str(tiny()))
    request = ChatCompletionRequest.model_validate({"messages": [], "tools": TOOLS})
    try:
        kind: Any = ParserManager.get_parser(tool, reasoning, enable_auto_tools=True, tokenizer=tokenizer)
        thought, content, calls = kind(tokenizer, request.tools).parse(
            "".join(hermes.PROBE), request, enable_auto_tools=True
        )
    except (RuntimeError, ImportError, ValueError, TypeError, NotImplementedError):
        return None
    functions = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls or []]
    return {"content": f"{thought}{content}" if thought else content, "tool_calls": functions}
