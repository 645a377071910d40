"""The numbers of a recorded call as the store holds them: packed, and without what its parent holds."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.records.packing import BYTES_PER_VALUE, pack_floats, pack_ids
from insitu.types import INCOMPLETE, ModelCall
from insitu.wire.model_call import DEMONSTRATION as DEMONSTRATION
from insitu.wire.values import AnyObject


@dataclass(frozen=True, slots=True)
class CallTokens:
    """One call without its messages. Ids are int32 and logprobs float32, little-endian."""

    id: str
    parent_id: str | None
    """The call whose prompt and output this prompt starts with; None if it was stored whole."""
    num_shared: int
    """The length of that beginning."""
    prompt_ids: bytes
    """The ids after those that the parent holds."""
    output_ids: bytes
    logprobs: bytes
    finish_reason: str
    constrained: bool
    run: str | None
    policy_step: int
    sampling: AnyObject
    """Every sampling parameter, as sent to the engine."""
    source: str = "gateway"
    """As in `ModelCall`."""

    @property
    def complete(self) -> bool:
        """True if the answer is complete; an incomplete call is never trained on."""
        return self.finish_reason not in INCOMPLETE

    @property
    def num_output(self) -> int:
        return len(self.output_ids) // BYTES_PER_VALUE


def call_tokens(call: ModelCall) -> CallTokens:
    """Pack the numbers of a whole call."""
    return CallTokens(
        id=call.id,
        parent_id=None,
        num_shared=0,
        prompt_ids=pack_ids(call.prompt_ids),
        output_ids=pack_ids(call.output_ids),
        logprobs=pack_floats(call.logprobs),
        finish_reason=call.finish_reason,
        constrained=call.constrained,
        run=call.run,
        policy_step=call.policy_step,
        sampling=call.sampling,
        source=call.source,
    )
