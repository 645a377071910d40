"""The trainer's own log-probabilities beside the sampler's, where a run keeps them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from insitu.backend.fleet.token_figures import TokenFigures
from insitu.errors import InvalidRequest
from insitu.harness.files.trained_tokens import tokens_file
from insitu.view.answers.groups import group_page, group_view
from insitu.view.answers.one_rollout import rollout_view
from insitu.view.answers.stored import find_rollout
from insitu.view.reading.query import Filters
from insitu.view.run import ViewedRun


@pytest.fixture
def kept(run_copy: Path) -> tuple[ViewedRun, dict[str, list[float]]]:
    """A run whose first step keeps them, each half a nat above the sampler's, by call."""
    line = orjson.loads((run_copy / "steps.jsonl").read_bytes().splitlines()[0])
    run = ViewedRun("run", run_copy, index=run_copy.parent / "index.db")
    while not run.index.refresh():
        pass
    logprobs: dict[str, list[float]] = {}
    for group in group_page(run, Filters(), "oldest", None, 200).groups:
        if group.store != f"epoch-{line['epoch']:04d}-step-{line['step_of_epoch']:04d}":
            continue
        for sibling in group_view(run, group.store, group.index, 64).tree.siblings:
            for call in find_rollout(run, sibling.rollout_id).rollout.read_calls():
                logprobs[call["id"]] = [each + 0.5 for each in call.get("logprobs", [])]
    tokens_file(run_copy, line["step"]).parent.mkdir()
    TokenFigures(
        list(logprobs),
        np.array([len(each) for each in logprobs.values()], np.int32),
        np.zeros(len(logprobs), np.float32),
        np.concatenate(list(logprobs.values())).astype(np.float32),
    ).write(run_copy / "tokens")
    (run_copy / "tokens" / "tokens.safetensors").rename(tokens_file(run_copy, line["step"]))
    return run, logprobs


def test_a_rollout_and_its_tree_have_them(kept: tuple[ViewedRun, dict[str, list[float]]]) -> None:
    run, logprobs = kept
    with_figures = without = 0
    for group in group_page(run, Filters(), "oldest", None, 200).groups:
        tree = group_view(run, group.store, group.index, 64).tree
        for sibling in tree.siblings:
            for call in rollout_view(run, sibling.rollout_id).calls:
                assert call.output is not None
                expected = logprobs.get(call.id)
                found = call.output.trainer_logprobs
                assert found == (None if expected is None else pytest.approx(expected, abs=1e-5))
                with_figures, without = with_figures + (found is not None), without + (found is None)
        for span in (span for node in tree.nodes for span in node.spans):
            if span.trainer_logprobs is not None:
                assert span.logprobs is not None
                above = np.array(span.trainer_logprobs) - np.array(span.logprobs)
                assert above == pytest.approx(0.5, abs=1e-5)
    run.close()
    assert with_figures == len(logprobs) > 5
    assert without > 5, "of other steps"


def test_a_damaged_file_is_named(kept: tuple[ViewedRun, dict[str, list[float]]]) -> None:
    run, _ = kept
    [path] = (run.path / "tokens").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    groups = group_page(run, Filters(), "oldest", None, 200).groups
    first = next(group for group in groups if group.store == "epoch-0000-step-0000")
    with pytest.raises(InvalidRequest, match=path.name):
        group_view(run, first.store, first.index, 64)
    run.close()
