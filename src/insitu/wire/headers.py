"""Names of the HTTP headers that agents, workflows and the gateway exchange."""

from __future__ import annotations

from typing import Final

ROLLOUT_HEADER: Final = "x-insitu-rollout"
"""The rollout that a model call belongs to."""
FUNCTION_HEADER: Final = "x-insitu-function"
"""The part of the agent that makes a model call."""
CALL_ID_HEADER: Final = "x-insitu-call-id"
"""The id under which the gateway recorded the call that it answers."""
BASE_URL_HEADER: Final = "x-insitu-base-url"
"""The address for the model calls of a rollout, sent to an agent behind HTTP."""
MODEL_HEADER: Final = "x-insitu-model"
"""The model that such an agent requests."""
