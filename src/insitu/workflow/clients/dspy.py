"""DSPy: ``dspy.LM``, for ``with dspy.context(lm=...)``."""

from __future__ import annotations

from insitu.errors import InvalidRequest
from insitu.workflow.context import current_rollout
from insitu.workflow.frameworks import package


def model(llm: str | None = None, **options: object) -> object:
    """Return an LM for `llms.<llm>`; its calls belong to the function in which it was made."""
    dspy = package("dspy", "dspy")
    if options.get("cache"):
        raise InvalidRequest(
            "`cache=True` would give one rollout the answers of another, without a recorded call",
            hint="remove `cache`",
        )
    settings = current_rollout().llm(llm)
    args: dict[str, object] = {
        "model": f"openai/{settings.model}",
        "api_base": settings.base_url,
        "api_key": settings.api_key,
        "num_retries": settings.max_retries,
        "cache": False,
        **({} if settings.request_timeout is None else {"timeout": settings.request_timeout}),
        **settings.options,
    }
    return dspy.LM(**args | options)
