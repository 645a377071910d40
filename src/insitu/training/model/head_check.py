"""At every load: does the output head alone give the model's own log-probabilities?

The policy scores tokens with the head on the hidden states. A family that does more, such as a softcap or a
multiplier, would be trained on other probabilities than it samples from.
Eight tokens tell, whatever the setting is called and wherever a configuration has it.
"""

from __future__ import annotations

import torch

from insitu.errors import CannotHonour
from insitu.training.model.policy import Policy

NUM_TOKENS = 8
TOLERANCE = 1e-3
"""Both sides go through the same head in float32: what a family does besides is far above it."""


def check_head(policy: Policy, base_model: str) -> None:
    """Raise CannotHonour if the model's own log-probabilities are not those of its head alone."""
    device = next(policy.parameters()).device
    size = policy.model.config.get_text_config().vocab_size
    ids = torch.linspace(1, size - 1, NUM_TOKENS, device=device).long()[None]
    try:
        difference = policy.head_difference(ids).item()
    except (AttributeError, TypeError) as error:
        raise CannotHonour(
            f"the trainer cannot score with {base_model} ({type(policy.model).__name__}): {error}",
            hint="choose another base model, such as the Llama, Qwen or SmolLM families",
        ) from error
    if not difference <= TOLERANCE:
        raise CannotHonour(
            f"{base_model} does more to its logits than its output head: its own log-probabilities differ "
            f"from the head's by up to {difference:.3g}, and the trainer uses the head alone",
            hint="choose a model without it, such as the Llama, Qwen or SmolLM families",
        )
