"""The questions to a model at every load, whatever its settings are called and wherever a file has them.

Does the output head alone give the model's own log-probabilities? The policy scores tokens with the head on
the hidden states. A family that does more, such as a softcap or a multiplier, would be trained on other
probabilities than it samples from. Eight tokens tell.

Do rows with branches give what each sequence gives alone? Where they do not, every sequence gets a row of its
own. Two short branches tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from insitu.errors import CannotHonour
from insitu.training.model.policy import Policy

log = logging.getLogger(__name__)

NUM_TOKENS = 8
TOLERANCE = 1e-3
"""Both sides go through the same head in float32: what a family does besides is far above it."""
_SHARED, _FIRST, _SECOND = 40, 50, 45
"""Tokens of a prompt and of its two branches. For fewer than 128 together a GPU has another kernel."""
_NOISE = 0.25
"""Of the error of a branch that sees its sibling; rounding to 16 bits is far below it."""


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


def settle_branches(policy: Policy, agree: Callable[[bool], bool] = bool) -> None:
    """Let the policy compute every sequence in a row of its own if its attention takes no branches.

    `agree` tells each of several ranks whether all of them say yes: they compute together, on equal rows.
    """
    reason = ""
    if agree(policy.can_branch):
        try:
            error, blind = branch_errors(policy)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as raised:
            reason = f"{type(raised).__name__}: {raised}"
        else:
            if not error < _NOISE * blind:
                reason = (
                    f"log-probabilities differ by {error:.3g} from those of each sequence alone, and by "
                    f"{blind:.3g} if a branch sees the other"
                )
        if agree(not reason):
            return
        log.warning("rows do not branch: %s", reason or "another rank found that they may not")
    if policy.can_branch:
        policy.keep_apart()


def branch_errors(policy: Policy) -> tuple[float, float]:
    """Return the mean error of a branch beside another one, and what it would be if it saw the other."""
    device = next(policy.parameters()).device
    size = policy.model.config.get_text_config().vocab_size
    length, begin = _SHARED + _FIRST + _SECOND, _SHARED + _FIRST
    ids_bl = (torch.arange(1, length + 1, device=device) * 7919 % (size - 1) + 1)[None]
    depths = [*range(begin), *range(_SHARED, _SHARED + _SECOND)]
    ends = [length] * _SHARED + [begin] * _FIRST + [length] * _SECOND
    depth_bl, end_bl = (torch.tensor([column], device=device) for column in (depths, ends))
    alone_t = policy.row_logprobs(torch.cat([ids_bl[:, :_SHARED], ids_bl[:, begin:]], 1))[_SHARED:]
    beside_t = policy.row_logprobs(ids_bl, depth_bl, end_bl)[begin:]
    seeing_t = policy.row_logprobs(ids_bl)[begin:]
    return (beside_t - alone_t).abs().mean().item(), (seeing_t - alone_t).abs().mean().item()
