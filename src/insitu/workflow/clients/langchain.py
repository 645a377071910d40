"""LangChain and LangGraph: ``langchain_openai.ChatOpenAI``."""

from __future__ import annotations

from insitu.workflow.clients.sdk import call_options, http_client, sdk_args
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return a chat model for `llms.<llm>`, for blocking and async use."""
    langchain_openai = package("langchain_openai", "langchain")
    sdk = package("openai", "langchain")
    settings = current_rollout().llm(llm)
    args = sdk_args(sdk, settings)
    return langchain_openai.ChatOpenAI(
        **{
            "model": settings.model,
            "http_async_client": args.pop("http_client"),
            "http_client": http_client(sdk, settings, sync=True),
            **args,
            **call_options(sdk.resources.chat.completions.Completions.create, settings),
            **options,
        }
    )
