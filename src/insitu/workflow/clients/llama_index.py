"""LlamaIndex: ``llama_index.llms.openai_like.OpenAILike``."""

from __future__ import annotations

from insitu.workflow.clients.sdk import call_options, http_client, sdk_args
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return an LLM for `llms.<llm>` that chats and calls functions, for blocking and async use."""
    openai_like = package("llama_index.llms.openai_like", "llama_index")
    sdk = package("openai", "llama_index")
    settings = current_rollout().llm(llm)
    args = sdk_args(sdk, settings)
    called = call_options(sdk.resources.chat.completions.Completions.create, settings)
    own = {key: called.pop(key) for key in ("temperature", "max_tokens") if key in called}
    given = {
        "model": settings.model,
        "api_base": args.pop("base_url"),
        "async_http_client": args.pop("http_client"),
        "http_client": http_client(sdk, settings, sync=True),
        "is_chat_model": True,
        "is_function_calling_model": True,
        **args,
        "temperature": 1.0,  # the usual default; LlamaIndex's own is 0.1
        **own,
        "additional_kwargs": called,
    }
    return openai_like.OpenAILike(**given | options)
