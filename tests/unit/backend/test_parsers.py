"""The parsers of tool calls and reasoning follow from the model's own files, unless the user names them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.plan.compute import Compute
from insitu.backend.plan.engine import NO_PARSER, apply_arguments
from insitu.backend.plan.parsers import read_chat_model, with_parsers
from insitu.backend.plan.settings import ServeSettings

# The lines of the published templates that the rules look at.
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}For each function call, return a json object with function "
    'name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": '
    '<function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
)
QWEN3 = QWEN + "{%- if enable_thinking is defined and enable_thinking is false %}<think>\\n\\n</think>"
CODER = "{%- if tools %}<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>"
THINKING = QWEN + "{{- '<|im_start|>assistant\\n<think>\\n' }}"
LLAMA = (
    "{%- if tools is not none %}Respond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.'
)
MISTRAL = "{%- if tools is defined %}{{ '[AVAILABLE_TOOLS]' }}{{- '[TOOL_CALLS][' }}"
R1 = "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
PLAIN = "{% for message in messages %}{{'<|im_start|>' + message['role'] + message['content']}}{% endfor %}"
UNKNOWN = "{% if tools %}CALL {{ tools }}{% endif %}"


def model(folder: Path, family: str, template: Any) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


@pytest.fixture
def settings(tmp_path: Path) -> ServeSettings:
    compute = Compute("float32", (), 1, None, "")
    return ServeSettings(tmp_path, "cpu", compute, "merged", "shared", "default", model="m")


@pytest.mark.parametrize(
    ("family", "template", "tools", "reasoning"),
    [
        ("qwen2", QWEN, "hermes", None),
        ("qwen3", QWEN3, "hermes", "qwen3"),
        ("qwen3", THINKING, "hermes", "qwen3"),
        ("qwen3", QWEN, "hermes", None),
        ("qwen2", THINKING, "hermes", "deepseek_r1"),
        ("qwen3_moe", CODER, "qwen3_coder", None),
        ("llama", LLAMA, "llama3_json", None),
        ("llama", PLAIN, None, None),
        ("llama", R1, None, "deepseek_r1"),
        ("mistral", MISTRAL, "mistral", None),
        ("smollm3", QWEN3, "hermes", None),
    ],
)
def test_the_template_and_the_family_decide(
    family: str,
    template: str,
    tools: str | None,
    reasoning: str | None,
    tmp_path: Path,
    settings: ServeSettings,
) -> None:
    chosen, lines = with_parsers(settings, model(tmp_path, family, template))
    engine = chosen.engine("m", "m")
    assert (engine.tool_call_parser, engine.reasoning_parser) == (tools, reasoning)
    said = [f"tool calls: {tools} parser, from the model's template; --tool-call-parser overrides"]
    thought = [f"reasoning: {reasoning} parser, from the model's template; --reasoning-parser overrides"]
    assert lines == (said if tools else []) + (thought if reasoning else [])


def test_an_unknown_template_with_tools_says_how_to_choose(tmp_path: Path, settings: ServeSettings) -> None:
    chosen, (line,) = with_parsers(settings, model(tmp_path, "odd", UNKNOWN))
    assert chosen.tool_call_parser is None
    assert line == (
        "tool calls: no parser is known for this odd model's template, so calls with tools are rejected; "
        "name vLLM's parser with --tool-call-parser NAME"
    )


def test_the_user_overrides(tmp_path: Path, settings: ServeSettings) -> None:
    path = model(tmp_path, "qwen3", QWEN3)
    chosen, lines = with_parsers(replace(settings, tool_call_parser="xlam"), path)
    assert (chosen.tool_call_parser, chosen.reasoning_parser, len(lines)) == ("xlam", "qwen3", 1)
    without = replace(settings, tool_call_parser=NO_PARSER, reasoning_parser=NO_PARSER)
    chosen, lines = with_parsers(without, path)
    engine = chosen.engine("m", "m")
    assert (engine.tool_call_parser, engine.reasoning_parser, lines) == (None, None, [])
    chosen, _ = with_parsers(settings, path)
    engine = apply_arguments(chosen.engine("m", "m"), {"tool_call_parser": NO_PARSER}, {}, 8)
    assert (engine.tool_call_parser, engine.reasoning_parser) == (None, "qwen3")


def test_templates_are_found_in_every_place(tmp_path: Path) -> None:
    both = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": QWEN}]
    assert "<tool_call>" in read_chat_model(model(tmp_path, "llama", both)).template
    model(tmp_path, "llama", None)
    assert not read_chat_model(str(tmp_path)).takes_tools
    (tmp_path / "chat_template.jinja").write_text(QWEN)
    assert read_chat_model(str(tmp_path)).takes_tools


def test_a_model_whose_files_cannot_be_read_has_no_parser(tmp_path: Path, settings: ServeSettings) -> None:
    model(tmp_path, "qwen2", QWEN)
    (tmp_path / "tokenizer_config.json").write_text("{")
    chosen, (line,) = with_parsers(settings, str(tmp_path))
    assert chosen == settings
    assert "tokenizer_config.json is not JSON" in line
    assert line.endswith("choose one with --tool-call-parser NAME")
