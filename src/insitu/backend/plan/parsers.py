"""vLLM's parsers of tool calls and reasoning, chosen by the model's family and chat template.

The template shows how the model writes a tool call, so its marks decide; the family decides between models
whose marks are alike. The first rule that fits counts. `tests/gates/test_vllm_contracts.py` compares the
names with those of the installed vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.backend.plan.models.files import CannotPlan, files_of
from insitu.backend.plan.settings import ServeSettings
from insitu.errors import NotFound
from insitu.json_values import JsonObject, as_list, as_object, parse_json

_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_DEEPSEEK_CALLS, _DEEPSEEK_TURN = "<｜tool▁calls▁begin｜>", "<｜Assistant｜>"


@dataclass(frozen=True, slots=True)
class Rule:
    """A parser, for templates with all of these marks and, if any are named, for these families alone."""

    parser: str
    marks: tuple[str, ...]
    families: tuple[str, ...] = ()
    """Values of `model_type`."""


TOOL_RULES = (
    Rule("qwen3_coder", ("<tool_call>", "<function=")),
    Rule("glm45", ("<tool_call>", "<arg_key>")),
    Rule("minimax_m2", ("<minimax:tool_call>",)),
    Rule("seed_oss", ("<seed:tool_call>",)),
    Rule("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Rule("deepseek_v3", (_DEEPSEEK_CALLS, "```json")),
    Rule("deepseek_v31", (_DEEPSEEK_CALLS,)),
    Rule("mistral", ("[TOOL_CALLS]",)),
    Rule("granite", ("<|tool_call|>",), ("granite", "granitemoe")),
    Rule("phi4_mini_json", ("<|tool|>",), ("phi3",)),
    Rule("internlm", ("<|plugin|>",)),
    Rule("openai", ("<|channel|>",), ("gpt_oss",)),
    Rule("olmo3", ("<function_calls>",), ("olmo3",)),
    Rule("llama4_pythonic", ("tools",), ("llama4",)),
    Rule("gemma4", ("<|tool_call>call:",)),
    Rule("lfm2", ("<|tool_call_start|>",)),
    Rule("muse_glimmer", ("<atem:function_calls>",)),
    Rule("llama3_json", ("dictionary of argument name and its value",), ("llama",)),
    # Qwen2.5, Qwen3, SmolLM3, Hermes: JSON between tags.
    Rule("hermes", ("<tool_call>", "arguments")),
)
_QWEN_3_5 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
REASONING_RULES = (
    Rule("deepseek_r1", (_DEEPSEEK_TURN, "<think>")),
    Rule("deepseek_r1", ("assistant\\n<think>",), ("qwen2",)),
    Rule("qwen3", ("enable_thinking",), ("qwen3", "qwen3_moe")),
    Rule("qwen3", ("assistant\\n<think>",), ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl")),
    # The parser takes an answer without a mark for thinking, so it is for templates that think by default.
    Rule("qwen3", ("<think>", "enable_thinking is false"), _QWEN_3_5),
    Rule("nemotron_v3", ("<think>", "if enable_thinking is defined else True"), ("nemotron_h",)),
    Rule("gemma4", ("<|channel>thought",), ("gemma4", "gemma4_text")),
    Rule("mistral", ("[THINK]",)),
    Rule("glm45", ("<think>",), ("glm4_moe",)),
    Rule("olmo3", ("<think>",), ("olmo3",)),
    Rule("minimax_m2", ("<think>",), ("minimax_m2",)),
    Rule("seed_oss", ("<seed:think>",)),
    Rule("openai_gptoss", ("<|channel|>",), ("gpt_oss",)),
)


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model's family and chat templates; several are joined."""

    family: str
    template: str

    @property
    def takes_tools(self) -> bool:
        return re.search(r"\btools\b", self.template) is not None

    def fitting(self, rules: Sequence[Rule]) -> str | None:
        """Return the parser of the first rule that fits."""
        for rule in rules:
            if rule.families and self.family not in rule.families:
                continue
            if all(mark in self.template for mark in rule.marks):
                return rule.parser
        return None


def with_parsers(settings: ServeSettings, model: str) -> tuple[ServeSettings, list[str]]:
    """Return the settings with the parsers that were not chosen by the user, and what to tell about them."""
    asked = (settings.tool_call_parser, settings.reasoning_parser)
    if None not in asked:
        return settings, []
    try:
        found = read_chat_model(model)
    except (NotFound, CannotPlan) as error:
        return settings, [
            f"tool calls: no parser, since the template of {model} cannot be read yet ({error.message}); "
            "choose one with --tool-call-parser NAME"
        ]
    tools = settings.tool_call_parser or (found.fitting(TOOL_RULES) if found.takes_tools else None)
    thinking = settings.reasoning_parser or found.fitting(REASONING_RULES)
    chosen = replace(settings, tool_call_parser=tools, reasoning_parser=thinking)
    return chosen, list(_lines(settings, chosen, found))


def read_chat_model(model: str) -> ChatModel:
    """Read family and templates of a model directory, or of a hub id: only small files are downloaded."""
    folder = files_of(model, _FILES)
    tokenizer = _object(folder / "tokenizer_config.json")
    told = [tokenizer.get("chat_template"), _object(folder / "chat_template.json").get("chat_template")]
    own = folder / "chat_template.jinja"
    texts = [own.read_text(errors="replace")] if own.is_file() else []
    for each in told:
        if isinstance(each, str):
            texts.append(each)
        # Several, each with a name.
        named = [as_object(entry) or {} for entry in as_list(each) or ()]
        texts += [text for entry in named if isinstance(text := entry.get("template"), str)]
    return ChatModel(str(_object(folder / "config.json").get("model_type", "")), "\n".join(texts))


def _lines(asked: ServeSettings, chosen: ServeSettings, found: ChatModel) -> Iterator[str]:
    if asked.tool_call_parser is None:
        parser = chosen.tool_call_parser
        if parser is not None:
            yield f"tool calls: {parser} parser, from the model's template; --tool-call-parser overrides"
        elif found.takes_tools:
            yield (
                f"tool calls: no parser is known for this {found.family} model's template, so calls with "
                "tools are rejected; name vLLM's parser with --tool-call-parser NAME"
            )
    if asked.reasoning_parser is None and chosen.reasoning_parser is not None:
        parser = chosen.reasoning_parser
        yield f"reasoning: {parser} parser, from the model's template; --reasoning-parser overrides"


def _object(path: Path) -> JsonObject:
    """Return a JSON file's object; empty if the model has no such file."""
    if not path.is_file():
        return {}
    try:
        return as_object(parse_json(path.read_bytes())) or {}
    except ValueError as error:
        raise CannotPlan(f"{path} is not JSON: {error}", hint="download the model again") from error
