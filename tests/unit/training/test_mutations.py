"""Every way to be silently wrong that we know of is caught by a guard or a test: one row per mutation.

A row alters one thing between sampling and learning. What catches it passes on the unaltered world and fails
on the altered one. The checks of the exactness zoo are among them, so this also shows that the zoo can fail.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from insitu.backend.fleet import trainer_rank
from insitu.errors import InvalidRequest, ProbeFailed, UpstreamError
from insitu.gateway.shared.faults import VersionMismatch
from insitu.training import selection
from insitu.training.batching import MicroBatch
from insitu.training.model.policy import Policy
from insitu.types import ModelCall, TrainingSequence
from tests.support.exactness import NotExact
from tests.support.guards import (
    the_advantages,
    the_direction,
    the_figures,
    the_gateway,
    the_logprobs,
    the_packing,
    the_probe,
    the_prompts,
    the_records,
    the_tokens,
)
from tests.support.sequences import altered
from tests.support.small_world import World, build_world, template_text

pytestmark = pytest.mark.timeout(120)
Patch = pytest.MonkeyPatch
Mutation = Callable[[World, Patch], World]


def mask_late(world: World, _: Patch) -> World:
    return world.every_sequence(lambda s: altered(s, mask=[0, *s.mask[:-1]]))


def mask_early(world: World, _: Patch) -> World:
    return world.every_sequence(lambda s: altered(s, mask=[*s.mask[1:], 0]))


def mask_all(world: World, _: Patch) -> World:
    return world.every_sequence(lambda s: altered(s, mask=[1] * len(s.mask)))


def other_template(world: World, _: Patch) -> World:
    text = template_text("llama3")

    def rendered(call: ModelCall) -> list[int]:
        return world.tokenizer.apply_chat_template(
            call.messages, chat_template=text, add_generation_prompt=True, return_dict=False
        )

    return world.every_call(lambda call: replace(call, prompt_ids=rendered(call)))


def retokenised(world: World, _: Patch) -> World:
    return world.every_call(lambda call: replace(call, output_ids=_again(world, call)))


def retokenised_to_fit(world: World, _: Patch) -> World:
    """The logprobs cut or repeated until they are as many as the new ids."""

    def fitted(call: ModelCall) -> ModelCall:
        ids = _again(world, call)
        return replace(call, output_ids=ids, logprobs=(call.logprobs * len(ids))[: len(ids)])

    return world.every_call(fitted)


def _again(world: World, call: ModelCall) -> list[int]:
    text = world.tokenizer.decode(call.output_ids)
    return world.tokenizer.encode(text, add_special_tokens=False)


def shifted_logprobs(world: World, _: Patch) -> World:
    return world.every_call(lambda call: replace(call, logprobs=[*call.logprobs[1:], call.logprobs[0]]))


def other_policy(world: World, _: Patch) -> World:
    """Sampled by another version of the weights than the record says."""
    (world.folder / "other").mkdir(exist_ok=True)
    other = build_world(world.folder / "other", seed=1)
    return replace(world, calls=other.calls, witnessed=other.witnessed)


def other_version_reported(world: World, _: Patch) -> World:
    answers = copy.deepcopy(world.answers)
    answers[-1]["choices"][0]["weight_versions"][0]["version"] = "run@2"
    return replace(world, answers=answers)


def version_changed_within(world: World, _: Patch) -> World:
    answers = copy.deepcopy(world.answers)
    answers[0]["choices"][0]["weight_versions"].append({"version": "run@2", "start": 4, "end": 7})
    return replace(world, answers=answers)


def answer_lost_its_end(world: World, _: Patch) -> World:
    answers = copy.deepcopy(world.answers)
    answers[0]["choices"][0]["token_ids"].pop()
    answers[0]["choices"][0]["logprobs"]["content"].pop()
    return replace(world, answers=answers)


def answer_shifted_logprobs(world: World, _: Patch) -> World:
    answers = copy.deepcopy(world.answers)
    entries = answers[0]["choices"][0]["logprobs"]["content"]
    entries.append(entries.pop(0))
    return replace(world, answers=answers)


def no_end_of_turn(world: World, _: Patch) -> World:
    return world.every_call(
        lambda call: replace(call, output_ids=call.output_ids[:-1], logprobs=call.logprobs[:-1])
    )


def lost_call(world: World, _: Patch) -> World:
    return replace(world, calls={rollout: calls[:1] for rollout, calls in world.calls.items()})


def trained_twice(world: World, _: Patch) -> World:
    return replace(world, tamper=lambda made: [*made, made[0]])


def edited_history(world: World, _: Patch) -> World:
    """A token of the first turn is another one: calls joined although the history was rewritten."""

    def edited(sequence: TrainingSequence) -> TrainingSequence:
        at = int(sequence.mask.argmax())
        ids = [*sequence.token_ids]
        ids[at] = (ids[at] + 1) % 256
        return altered(sequence, token_ids=ids)

    return world.every_sequence(edited)


def other_text_put_back(world: World, _: Patch) -> World:
    return world.every_call(lambda call: replace(call, prompt_ids=[*call.prompt_ids[:-1], 7]))


def foreign_id(world: World, _: Patch) -> World:
    return world.every_sequence(lambda s: altered(s, token_ids=[*s.token_ids[:-1], 100_000]))


def rotated_advantages(world: World, patch: Patch) -> World:
    real = selection.group_advantages

    def rotated(returns: Any, kind: Any, rewards: Any) -> list[list[float]]:
        made = real(returns, kind, rewards)
        return [*made[1:], made[0]]

    patch.setattr(selection, "group_advantages", rotated)
    return world


def advantages_late(world: World, _: Patch) -> World:
    return world.every_sequence(lambda s: altered(s, advantages=[0.0, *s.advantages[:-1]]))


def _altered_batches(patch: Patch, change: Callable[[MicroBatch], MicroBatch]) -> None:
    real = Policy.forward
    patch.setattr(Policy, "forward", lambda self, batch: real(self, change(batch)))


def _tree(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    assert batch.depth_bl is not None
    assert batch.end_bl is not None
    return batch.depth_bl, batch.end_bl


def shifted_positions(world: World, patch: Patch) -> World:
    """Branches start one position late: rotary embeddings would not see a shift of everything."""

    def change(batch: MicroBatch) -> MicroBatch:
        depth_bl, end_bl = _tree(batch)
        return replace(batch, depth_bl=depth_bl + (end_bl < end_bl.max()))

    _altered_batches(patch, change)
    return world


def positions_of_the_row(world: World, patch: Patch) -> World:
    """Positions counted through the packed row instead of through each rollout."""

    def change(batch: MicroBatch) -> MicroBatch:
        depth_bl, _ = _tree(batch)
        return replace(batch, depth_bl=torch.arange(depth_bl.shape[1])[None])

    _altered_batches(patch, change)
    return world


def siblings_seen(world: World, patch: Patch) -> World:
    """Plain causal attention through the packed row: a rollout sees the ones before it."""
    _altered_batches(patch, lambda b: replace(b, end_bl=torch.full_like(_tree(b)[1], b.ids_bl.shape[1])))
    return world


def predicted_from_itself(world: World, patch: Patch) -> World:
    _altered_batches(
        patch, lambda b: replace(b, predictor_u=(b.predictor_u + 1).clamp(max=b.ids_bl.numel() - 1))
    )
    return world


def not_published(world: World, patch: Patch) -> World:
    """The engine is given the weights without what was learned."""
    real = trainer_rank.merged_tensors

    def plain(model: Any, adapter: Any) -> list[Any]:
        return [replace(tensor, _adapter=None) for tensor in real(model, adapter)]

    patch.setattr(trainer_rank, "merged_tensors", plain)
    return world


ROWS: list[tuple[Mutation, Callable[[World], None], type[Exception]]] = [
    (mask_late, the_tokens, NotExact),
    (mask_late, the_figures, NotExact),
    (mask_early, the_tokens, NotExact),
    (mask_early, the_figures, NotExact),
    (mask_all, the_figures, InvalidRequest),
    (other_template, the_records, NotExact),
    (other_template, the_tokens, NotExact),
    (other_template, the_logprobs, NotExact),
    (other_template, the_figures, NotExact),
    (retokenised, the_figures, InvalidRequest),
    (retokenised_to_fit, the_records, NotExact),
    (retokenised_to_fit, the_tokens, NotExact),
    (retokenised_to_fit, the_logprobs, NotExact),
    (retokenised_to_fit, the_figures, NotExact),
    (shifted_logprobs, the_records, NotExact),
    (shifted_logprobs, the_tokens, NotExact),
    (shifted_logprobs, the_logprobs, NotExact),
    (shifted_logprobs, the_packing, NotExact),
    (shifted_logprobs, the_figures, NotExact),
    (answer_shifted_logprobs, the_gateway, UpstreamError),
    (other_policy, the_logprobs, NotExact),
    (other_policy, the_figures, NotExact),
    (other_version_reported, the_gateway, VersionMismatch),
    (version_changed_within, the_gateway, VersionMismatch),
    (not_published, the_probe, ProbeFailed),
    (no_end_of_turn, the_records, NotExact),
    (no_end_of_turn, the_tokens, NotExact),
    (answer_lost_its_end, the_gateway, UpstreamError),
    (rotated_advantages, the_advantages, NotExact),
    (rotated_advantages, the_direction, NotExact),
    (advantages_late, the_advantages, NotExact),
    (shifted_positions, the_packing, NotExact),
    (shifted_positions, the_figures, NotExact),
    (positions_of_the_row, the_packing, NotExact),
    (positions_of_the_row, the_figures, NotExact),
    (siblings_seen, the_packing, NotExact),
    (siblings_seen, the_figures, NotExact),
    (predicted_from_itself, the_packing, NotExact),
    (predicted_from_itself, the_figures, NotExact),
    (lost_call, the_records, NotExact),
    (trained_twice, the_tokens, NotExact),
    (edited_history, the_tokens, NotExact),
    (edited_history, the_logprobs, NotExact),
    (other_text_put_back, the_prompts, NotExact),
    (foreign_id, the_figures, InvalidRequest),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    before = torch.get_num_threads()
    folder: Path = tmp_path_factory.mktemp("world")
    yield build_world(folder)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("mutate", "catch", "error"), ROWS, ids=[f"{m.__name__}-by-{c.__name__}" for m, c, _ in ROWS]
)
def test_is_caught(
    mutate: Mutation,
    catch: Callable[[World], None],
    error: type[Exception],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    catch(world)
    altered = mutate(world, monkeypatch)
    with pytest.raises(error):
        catch(altered)
