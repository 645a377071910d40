"""Build a response and its output items."""

from __future__ import annotations

from typing import Any

from insitu.gateway.engines.sample import Sample
from insitu.gateway.protocols.base import Lane
from insitu.gateway.protocols.request import CallRequest

_REPEATED = ("instructions", "max_output_tokens", "max_tool_calls", "user")


def reasoning_item(lane: Lane, index: int, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return _item(lane, "rs", index, "reasoning") | {"summary": [], "content": content}


def message_item(lane: Lane, index: int, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
    return _item(lane, "msg", index, "message") | {"role": "assistant", "content": content}


def call_item(lane: Lane, index: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    said = {"call_id": call["id"], "name": function["name"], "arguments": function["arguments"]}
    return _item(lane, "fc", index, "function_call") | said


def _item(lane: Lane, prefix: str, index: int, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}_{lane.call_id}_{index}", "type": kind, "status": "completed"}


def response_object(
    lane: Lane,
    request: CallRequest,
    created: int,
    output: list[dict[str, Any]],
    sample: Sample | None = None,
    usage: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Build the response, repeating what the client asked for; without a sample it is in progress."""
    asked, cut = request.original, sample is not None and sample.finish_reason == "length"
    status = "in_progress" if sample is None else "incomplete" if cut else "completed"
    return {
        "id": lane.call_id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        **{key: asked.get(key) for key in _REPEATED},
        "metadata": asked.get("metadata") or {},
        "model": lane.model_name,
        "output": output,
        "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
        "store": False,
        "temperature": request.body["temperature"],
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_logprobs": asked.get("top_logprobs") or 0,
        "top_p": request.body["top_p"],
        "truncation": "disabled",
        "usage": _usage(usage) if usage else None,
    }


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    # The engine's answer does not say how many tokens were cached or thought; clients need the fields.
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
