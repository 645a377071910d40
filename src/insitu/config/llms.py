"""`llms`: the models that the workflow calls."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, ConfigDict, Field, SecretStr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from insitu.config.values.problems import NOT_HONOURED
from insitu.json_values import JsonObject, as_object
from insitu.plugins import Section

RETRIED_STATUS_CODES = frozenset({408, 409, 429})
"""Status codes that clients of the OpenAI protocol retry, besides 500 and above."""
RETRIED_ERRORS = frozenset({"429", "too many requests"})


class LLMConfig(Section):
    """One model behind the OpenAI protocol. Keys without a field here are sent with every call."""

    model_config = ConfigDict(extra="allow")

    type_name: Literal["openai"] = Field(default="openai", alias="_type")
    """The protocol."""
    model_name: str = Field(min_length=1, validation_alias=AliasChoices("model_name", "model"))
    """The name of the model at its server."""
    api_key: SecretStr = SecretStr("")
    """The key of the server."""
    base_url: str | None = None
    """The address of the server, with `/v1`. A trained model without one is at the gateway of the backend."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, 0 for greedy answers."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability."""
    seed: int | None = None
    """Seed of sampling; every rollout derives its own from it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of an answer."""
    max_retries: int = Field(default=10, ge=0, validation_alias=AliasChoices("max_retries", "num_retries"))
    """Retries of a call that failed."""
    request_timeout: float | None = Field(default=None, gt=0)
    """Seconds for one call; None leaves it to the client."""
    do_auto_retry: bool = True
    """Accepted either way: `max_retries` alone controls retries."""
    retry_on_status_codes: list[int | str] | None = None
    """Accepted if all of them are retried anyway: 408, 409, 429 and 5xx."""
    retry_on_errors: list[str] | None = None
    """Accepted if all of them are retried anyway."""

    @property
    def options(self) -> JsonObject:
        """Options sent with every call: the sampling fields that are set, and every extra key."""
        named: JsonObject = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
        }
        return {key: value for key, value in named.items() if value is not None} | (self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, data: object) -> object:
        values = as_object(data) or {}
        for name, other in (("model_name", "model"), ("max_retries", "num_retries")):
            if name in values and other in values:
                text = f"`{name}` and `{other}` are the same setting: keep one"
                raise PydanticCustomError("insitu", "{text}", {"text": text})
        return data

    @field_validator("retry_on_status_codes")
    @classmethod
    def _retried_anyway(cls, codes: list[int | str] | None) -> list[int | str] | None:
        for code in codes or []:
            text = str(code).lower()
            retried = text == "5xx" or (
                text.isdigit() and (int(text) in RETRIED_STATUS_CODES or int(text) >= 500)
            )
            if not retried:
                text = "only 408, 409, 429 and 5xx are retried"
                raise PydanticCustomError(NOT_HONOURED, "{text}", {"text": text})
        return codes

    @field_validator("retry_on_errors")
    @classmethod
    def _retried_by_status(cls, errors: list[str] | None) -> list[str] | None:
        if any(error.lower() not in RETRIED_ERRORS for error in errors or []):
            text = "calls are retried by status code (408, 409, 429, 5xx), not by message"
            raise PydanticCustomError(NOT_HONOURED, "{text}", {"text": text})
        return errors
