"""A request's parts: a field is honoured, dropped, or rejected because the answer would be another one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from insitu.errors import InvalidRequest
from insitu.gateway.shared.faults import reading, text_of
from insitu.gateway.shared.unknown_fields import drop

UNHONOURED = frozenset(
    # of OpenAI's requests
    {"audio", "function_call", "functions", "image", "modalities", "prompt", "verbosity"}
    | {"web_search_options"}
    # of Anthropic's
    | {"compaction", "container", "context_management", "fallbacks", "mcp_servers", "thread"}
    # of vLLM's: the prompt
    | {"add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message", "documents"}
    | {"media_io_kwargs", "mm_payload", "mm_processor_kwargs", "previous_input_messages", "prompt_embeds"}
    | {"truncate_prompt_tokens", "truncation_side", "best_of", "echo", "suffix"}
    # sampling
    | {"guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"}
    | {"length_penalty", "logits_processors", "max_new_tokens", "repetition_detection", "use_beam_search"}
    | {"thinking_token_budget", "vllm_xargs", "watermarking", "ec_transfer_params", "kv_transfer_params"}
    | {"cache_salt"}  # the gateway's own: nobody reads the prefix cache of others
    # of another protocol
    | {"instructions", "max_completion_tokens", "max_output_tokens", "max_tokens", "n", "reasoning_effort"}
    | {"response_format", "stop", "stop_sequences", "system", "logprobs", "top_logprobs", "return_token_ids"}
    # the answer
    | {"enable_response_messages", "include_reasoning", "logprob_token_ids", "prompt_logprobs"}
    | {"return_mm_kwargs", "return_prompt_text", "return_token_offsets", "return_tokens_as_token_ids"}
    | {"routed_experts_prompt_start"}
)
"""Fields of a request that change its answer. A protocol that does not honour one rejects it."""
UNHONOURED_IN_PARTS = frozenset(
    {"allowed_callers", "audio", "block_binding", "defer_loading", "function_call", "input_examples"}
    | {"name", "partial", "prefix", "task_budget", "toolset_name", "verbosity"}
)
"""Likewise, in messages, blocks, items and tools."""
_DEFAULTS = (
    *(("modalities", ["text"]), ("verbosity", "medium"), ("add_generation_prompt", True)),
    *(("defer_loading", False), ("allowed_callers", ["direct"])),
)
"""Values of such fields that change nothing, and that clients spell out."""

MEDIA_KINDS = (
    *("image", "image_url", "input_image", "audio", "input_audio", "audio_url", "video", "video_url"),
    *("document", "file", "input_file", "image_embeds", "audio_embeds"),
)
"""A tuple: a client may send a list or an object as the type of a part, which no set can look up."""


def objects(value: object, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, or raise InvalidRequest."""
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(isinstance(item, dict) for item in items):
        raise InvalidRequest(f"`{where}` must be a list of objects.")
    return cast("list[dict[str, Any]]", items)


def known_fields(part: dict[str, Any], known: Collection[str], where: str = "") -> dict[str, Any]:
    """Return the fields that are set and known. Reject one that would change the answer; drop the others."""
    given = {key: value for key, value in part.items() if value is not None and (key, value) not in _DEFAULTS}
    fields = {key: f"{where}.{key}" if where else key for key in given if key not in known}
    harmful = UNHONOURED_IN_PARTS if where else UNHONOURED
    if rejected := sorted(f"`{name}`" for key, name in fields.items() if key in harmful):
        raise InvalidRequest(f"Not supported by this gateway: {', '.join(rejected)}.")
    for name in fields.values():
        drop(name)
    return {key: value for key, value in given.items() if key in known}


def text_field(part: dict[str, Any], key: str, where: str) -> str:
    """Return a field that must be a string."""
    value = part.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"`{where}.{key}` must be a string.")
    return value


def kind_refusal(kind: object, model: object, where: str) -> InvalidRequest:
    """Return the error that says why a part of this type is not accepted."""
    if kind in MEDIA_KINDS:
        return InvalidRequest(
            f"`{where}` has the type `{kind}`, but `{model}` is served for text only.",
            hint="describe its content in text instead",
        )
    return InvalidRequest(f"`{where}` has the type {kind!r}, which is not supported by this gateway.")


def joined(texts: list[str]) -> str | list[dict[str, Any]]:
    """Return the content of a chat message: one text as it is, several as parts that the engine joins."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""


def whole_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of an engine's whole answer, each with its id, name and arguments."""
    with reading():
        return [
            {
                "id": call["id"],
                "function": {
                    "name": call["function"]["name"],
                    "arguments": text_of(call["function"]["arguments"] or ""),
                },
            }
            for call in tool_calls(message)
        ]


def tool_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a chat message or of a part of one."""
    return cast("list[dict[str, Any]]", message.get("tool_calls") or [])
