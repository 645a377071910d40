"""`finetuning.ending_rewards`: failures of the policy may have a reward, outages and bugs never."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from insitu.config.ending_rewards import EndingRewards
from insitu.config.finetuning import FinetuningConfig
from insitu.types import POLICY_FAILURES, Ending


def test_failures_of_the_policy_may_have_a_reward() -> None:
    given = {"context_overflow": 0.0, "timeout": -1}
    assert FinetuningConfig.model_validate({"ending_rewards": given}).ending_rewards.given == given
    assert FinetuningConfig.model_validate({"ending_rewards": {"timeout": 2}}).ending_rewards.given == {
        Ending.TIMEOUT: 2.0
    }
    assert FinetuningConfig().ending_rewards.given == {}
    assert set(EndingRewards.model_fields) == set(POLICY_FAILURES)


@pytest.mark.parametrize("ending", [ending for ending in Ending if ending not in POLICY_FAILURES])
def test_no_other_ending_may(ending: Ending) -> None:
    with pytest.raises(ValidationError) as error:
        FinetuningConfig.model_validate({"ending_rewards": {"timeout": 0.0, ending.value: 0.0}})
    assert f"{ending} cannot have a reward here, because" in str(error.value)
    assert "; context_overflow, step_limit and timeout can" in str(error.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tool_error": 0.0}, "return an output for the evaluator to score"),
        ({"length": 0.0}, "the evaluator scores it"),
        ({"infrastructure": 0.0}, "it says nothing about the policy"),
        ({"overflow": 0.0}, "overflow"),
        ({"timeout": "soon"}, "should be a valid number"),
        ({"timeout": float("nan")}, "should be a finite number"),
        ({"timeout": 1e10}, "less than or equal to"),
        ({"timeout": True}, "timeout"),
    ],
)
def test_an_error_tells_what_is_possible(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as error:
        FinetuningConfig.model_validate({"ending_rewards": given})
    assert said in str(error.value)
