"""Published chat templates write a thought and a tool call; the chosen parsers read the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.plan.parsers import REASONING_RULES, TOOL_RULES, ChatModel
from insitu.testing.models import tiny

pytestmark = pytest.mark.timeout(120)
FOUND = {"at": "the sea", "times": 3}
THOUGHT = "I think so."
PROPERTIES = {"at": {"type": "string"}, "times": {"type": "integer"}}
LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": LOOK}]
QUESTION = {"role": "user", "content": "Where?"}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>")
GEMMA_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|turn>", "<turn|>")
TEMPLATES = (
    ("qwen2_5", "qwen2", "hermes", None),
    ("qwen3", "qwen3", "hermes", "qwen3"),
    ("qwen3_instruct_2507", "qwen3", "hermes", None),
    ("qwen3_vl", "qwen3_vl", "hermes", None),
    ("qwen3_5_think", "qwen3_5", "qwen3_coder", "qwen3"),
    ("qwen3_6", "qwen3_5_moe", "qwen3_coder", "qwen3"),
    ("qwen3_8", "qwen3_5", "qwen3_coder", "qwen3"),
    ("llama3_1", "llama", "llama3_json", None),
    ("glm4moe", "glm4_moe", "glm45", "glm45"),
    ("gemma4", "gemma4", "gemma4", "gemma4"),
    ("gemma4_v5", "gemma4", "gemma4", "gemma4"),
    ("lfm2_v2", "lfm2", "lfm2", None),
    ("nemotron_3_nano", "nemotron_h", "qwen3_coder", "nemotron_v3"),
    ("nemotron_3_super", "nemotron_h", "qwen3_coder", "nemotron_v3"),
    ("nemotron_3_ultra", "nemotron_h", "qwen3_coder", "nemotron_v3"),
    ("nemotron_3_5_lightning", "nemotron_h", "qwen3_coder", "nemotron_v3"),
)
"""Template, family, and the two parsers."""


def template_of(name: str) -> str:
    import trl

    return (Path(trl.__path__[0]) / "chat_templates" / f"{name}.jinja").read_text()


def read(text: str, template: str, tools: str | None, reasoning: str | None) -> tuple[Any, Any, list[Any]]:
    """Return (thought, content, calls) as the server's parser reads the text that a model sampled."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    tokenizer = tokenizer_with(template)
    kind: Any = ParserManager.get_parser(tools, reasoning, enable_auto_tools=True, tokenizer=tokenizer)
    request = ChatCompletionRequest.model_validate({"messages": [QUESTION], "tools": TOOLS})
    thought, content, calls = kind(tokenizer, request.tools).parse(text, request, enable_auto_tools=True)
    return thought, content, [(call.name, json.loads(call.arguments)) for call in calls or []]


def tokenizer_with(template: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(tiny()))
    tokenizer.add_tokens([mark for mark in (*MARKS, *GEMMA_MARKS) if mark in template], special_tokens=True)
    tokenizer.add_tokens(["<|python_tag|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def sampled(template: str) -> str:
    """Return the turn that the template writes: what a model samples after the prompt."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": FOUND}}
    answer = {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "reasoning": THOUGHT}
    tokenizer = tokenizer_with(template)
    prompt = tokenizer.apply_chat_template(
        [QUESTION], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(
        [QUESTION, answer | {"tool_calls": [call]}], tools=TOOLS, tokenize=False
    )
    pairs = enumerate(zip(prompt, whole, strict=False))
    return whole[next((at for at, (one, other) in pairs if one != other), len(prompt)) :]


@pytest.mark.parametrize(("name", "family", "tools", "reasoning"), TEMPLATES)
def test_what_the_template_writes_is_read(name: str, family: str, tools: str, reasoning: str | None) -> None:
    template = template_of(name)
    model = ChatModel(family, template)
    assert (model.fitting(TOOL_RULES), model.fitting(REASONING_RULES)) == (tools, reasoning)
    text = sampled(template)
    thought, _, calls = read(text, template, tools, reasoning)
    assert calls == [("look", FOUND)], text
    assert (thought or "").strip() == (THOUGHT if reasoning else ""), text


def test_a_template_that_does_not_think_by_default_loses_no_answer() -> None:
    """vLLM's parser would take a whole answer for a thought that was begun in the prompt."""
    template = template_of("qwen3_5_nothink")
    model = ChatModel("qwen3_5", template)
    assert model.fitting(TOOL_RULES) == "qwen3_coder"
    assert model.fitting(REASONING_RULES) is None
    assert read("Yes.", template, "qwen3_coder", None) == (None, "Yes.", [])
    assert read("Yes.", template, "qwen3_coder", "qwen3")[0] == "Yes.", "the rule may go"


def test_gemma_answers_without_a_thought() -> None:
    assert read("Yes.", template_of("gemma4"), "gemma4", "gemma4") == (None, "Yes.", [])
