"""Tool calls in the text of an answer, as vLLM's `hermes` parser reads them.

    Let me look. <tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>
    └ content ─┘            └ one call ──────────────────────────────┘

Whatever is not exactly that is left to the engine: `message_of` then returns None.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, cast

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)

PROBE_TOOL = "look"
PROBE = (
    *("a", "<think>", "\nb\n", "</think>", "\n<answer>\nc\n</answer>", "[THINK]", "d", "[/THINK]"),
    *("<seed:think>", "e", "</seed:think>", "<|channel>", "thought\nf", "<channel|>"),
    *(
        "<|message_model|>",
        "<|content_thinking|>",
        "g",
        "<|end_message|>",
        "<|message_model|>",
        "<|content_text|>",
    ),
    *("to=self", "<|message|>", "h", "<|eom|>", "Here is my thought process: i Here is my response: j\n"),
    *(OPEN, f' {{"arguments": {{"at": "\\u00e9", "n": [1.50]}}, "name": "{PROBE_TOOL}"}}\n', CLOSE),
    *("k", OPEN, f'{{"name": "{PROBE_TOOL}", "arguments": {{}}}}', CLOSE, "l"),
)
"""A text that other parsers read otherwise, those for reasoning too, in parts that may be special tokens."""


def message_of(text: str) -> dict[str, Any] | None:
    """Return the message that a whole text is; None if only the engine knows how to read it."""
    if OPEN not in text:
        return {"role": "assistant", "content": text}
    try:
        read = [json.loads(found) for found in _CALL.findall(text)]
        calls = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in read]
        "".join(name + arguments for name, arguments in calls).encode()  # reject half characters
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    before = text[: text.index(OPEN)]
    return {
        "role": "assistant",
        "content": before if before.strip() else None,
        "tool_calls": [_call(name, arguments) for name, arguments in calls],
    }


def flat(message: dict[str, Any]) -> str:
    """Return content and calls of a message as one text, to compare two of them."""
    calls = cast("list[dict[str, dict[str, str]]]", message.get("tool_calls") or [])
    functions = [call["function"] for call in calls]
    flat_calls = "".join(f"{OPEN}{one['name']} {one['arguments']}{CLOSE}" for one in functions)
    return str(message.get("content") or "") + flat_calls


class BeforeCalls:
    """The part of a streamed text that is certainly content: before a tool call, and no beginning of one."""

    def __init__(self) -> None:
        self.opened = False
        """True once a tool call has begun."""
        self._held: str = ""

    def feed(self, text: str) -> str:
        """Return the content that is certain now; what is held at the end of an answer is never sent."""
        if self.opened:
            return ""
        text = self._held + text
        at = text.find(OPEN)
        self.opened = at >= 0
        if not self.opened:
            at = len(text) - _overlap(text)
        self._held = text[at:]
        return text[:at]


def _overlap(text: str) -> int:
    """Return the length of the longest end of a text that a tool call may begin with."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"chatcmpl-tool-{secrets.token_hex(8)}", "type": "function", "function": function}
