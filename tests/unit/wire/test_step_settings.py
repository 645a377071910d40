"""Settings of a step are read by one definition: what the API refuses, the configuration refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any, get_args, get_type_hints

import pytest
from annotated_types import Interval
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

import insitu.types
from insitu import LoraSettings, StepSettings
from insitu.backend.art.settings import step_settings
from insitu.errors import InvalidRequest
from insitu.harness.interfaces.settings import AdapterConfig
from insitu.wire.art import TrainBody
from insitu.wire.bodies import RunBody, StepBody
from insitu.wire.step_settings import Method

STEP, RUN = TypeAdapter(StepBody), TypeAdapter(RunBody)
NAMES = [field.name for field in fields(StepSettings)]
HINTS = get_type_hints(StepSettings, include_extras=True)


def interval_of(hint: Any) -> Interval | None:
    """The range in an annotation, also where null is allowed besides."""
    for arm in (hint, *get_args(hint)):
        for each in getattr(arm, "__metadata__", ()):
            if isinstance(each, Interval):
                return each
    return None


INTERVALS = {name: found for name, hint in HINTS.items() if (found := interval_of(hint)) is not None}


def around(bound: Any) -> list[Any]:
    """A bound and its neighbours, whole and broken."""
    number = float(bound)
    below, above = math.nextafter(number, -math.inf), math.nextafter(number, math.inf)
    return [bound, number, bound - 1, bound + 1, below, above]


EDGES = [
    value
    for interval in INTERVALS.values()
    for bound in (interval.gt, interval.ge, interval.lt, interval.le)
    if bound is not None
    for value in around(bound)
]
VALUES = (
    st.sampled_from(EDGES)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["dapo", "grpo", "rloo", "std", "mean", "nonsense", "", "DAPO"])
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.sampled_from(["a", "learning_rate"]), st.integers(), max_size=1)
)
SETTINGS = st.dictionaries(
    st.sampled_from(NAMES) | st.sampled_from(["num_pass", "rank", ""]), VALUES, max_size=5
)


def _read(read: Callable[[], StepSettings]) -> StepSettings | dict[tuple[Any, ...], str]:
    """The settings, or the reason by the place inside them."""
    try:
        return read()
    except ValidationError as error:
        return {line["loc"][1:]: line["msg"] for line in error.errors()}


def api(given: Any) -> StepSettings | dict[tuple[Any, ...], str]:
    return _read(lambda: STEP.validate_python({"groups": ["g"], "settings": given}).settings)


def harness(given: Any) -> StepSettings | dict[tuple[Any, ...], str]:
    whole = {"_type": "insitu", "backend": {"ip": "localhost", "port": 7623}, "training": given}
    return _read(lambda: AdapterConfig.model_validate(whole).training)


def art(given: Any) -> StepSettings | None:
    body = {"model": {"name": "m"}, "trajectory_groups": [{"trajectories": []}], "insitu": given}
    try:
        return step_settings(TrainBody.model_validate(body))
    except InvalidRequest:
        return None


@settings(max_examples=500, deadline=None)
@given(given=SETTINGS)
def test_both_ends_accept_the_same_settings_and_give_the_same_reasons(given: dict[str, Any]) -> None:
    read = api(given)
    assert harness(given) == read
    found = art({"mask_truncated": True} | given)
    assert found == (read if isinstance(read, StepSettings) else None)
    if isinstance(read, StepSettings):
        assert api(asdict(read)) == harness(read) == read


@pytest.mark.parametrize("name", sorted(INTERVALS))
def test_every_bound_is_exact_at_both_ends(name: str) -> None:
    interval = INTERVALS[name]
    whole = "int" in str(HINTS[name])
    for value in [value for value in EDGES if isinstance(value, int) or not whole]:
        inside = (
            (interval.gt is None or value > interval.gt)
            and (interval.ge is None or value >= interval.ge)
            and (interval.lt is None or value < interval.lt)
            and (interval.le is None or value <= interval.le)
        )
        # The penalty on length needs a length, and some settings belong to one method.
        given = ({"overlong_tokens": 2**31 - 1} if name.startswith("overlong_") else {}) | {name: value}
        given |= {"method": method} if (method := {"min_reward": "sft", "dpo_beta": "dpo"}.get(name)) else {}
        assert isinstance(api(given), StepSettings) == inside, value
        assert isinstance(harness(given), StepSettings) == inside, value


def test_every_number_has_a_range() -> None:
    numbers = {name for name, hint in HINTS.items() if "int" in str(hint) or "float" in str(hint)}
    assert numbers == set(INTERVALS)


USED = {
    "grpo": {"loss": "gspo", "beta": 0.1, "reference_step": 2, "max_sampler_weight": None},
    "sft": {"min_reward": 0.5, "num_passes": 2, "mask_truncated": False},
    "dpo": {"dpo_beta": 0.2, "reference_step": 2},
    "distill": {"teacher": "run@3", "max_sampler_weight": 3.0, "max_staleness": 1},
}


@pytest.mark.parametrize(
    ("method", "unused"),
    [
        ("grpo", {"min_reward": 0.5}),
        ("grpo", {"dpo_beta": 0.1}),
        ("grpo", {"teacher": "big"}),
        ("sft", {"loss": "grpo"}),
        ("sft", {"beta": 0.1}),
        ("sft", {"max_staleness": 1}),
        ("sft", {"max_sampler_weight": None}),
        ("dpo", {"min_reward": 0.0}),
        ("dpo", {"entropy_bonus": 0.1}),
        ("dpo", {"overlong_tokens": 5}),
        ("distill", {"reference_step": 2}),
        ("distill", {"dpo_beta": 0.1}),
        ("distill", {"clip_low": 0.1}),
    ],
)
def test_settings_that_a_method_does_not_use_are_refused_by_name(method: str, unused: Any) -> None:
    used = {"method": method} | USED[method]
    assert isinstance(api(used), StepSettings)
    (reason,) = _refused(api(used | unused)).values()
    assert reason == f"Value error, method {method} does not use {next(iter(unused))}: leave it out"
    assert api(used | unused) == harness(used | unused)


def test_distillation_needs_a_teacher_and_others_a_known_method() -> None:
    assert "needs a teacher" in _refused(api({"method": "distill"}))[()]
    assert ("method",) in _refused(api({"method": "ppo"}))


def test_groups_of_equal_rewards_teach_where_rewards_are_not_compared() -> None:
    of = {method: StepSettings(method=method).trains_equal_groups for method in get_args(Method)}
    assert of == {"grpo": False, "sft": True, "dpo": False, "distill": True}


def _refused(read: StepSettings | dict[tuple[Any, ...], str]) -> dict[tuple[Any, ...], str]:
    assert not isinstance(read, StepSettings)
    return read


@pytest.mark.parametrize("given", [None, [], 3, "dapo"])
def test_what_is_no_mapping_is_refused(given: Any) -> None:
    assert not isinstance(api(given), StepSettings)
    assert not isinstance(harness(given), StepSettings)


def test_settings_made_in_python_are_checked_where_they_are_configured() -> None:
    assert harness(StepSettings(num_passes=50)) == {
        ("num_passes",): "Input should be less than or equal to 32"
    }


def test_text_of_a_number_is_read_in_a_configuration_only() -> None:
    assert harness({"learning_rate": "1e-6", "mask_truncated": "false"}) == StepSettings(
        learning_rate=1e-6, mask_truncated=False
    )
    assert api({"learning_rate": "1e-6"}) == {("learning_rate",): "Input should be a valid number"}


def test_adapters_have_ranges() -> None:
    def lora(**fields: Any) -> LoraSettings:
        return RUN.validate_python({"name": "n", "base_model": "m", "lora": fields}).lora

    assert lora() == LoraSettings()
    assert lora(rank=512, alpha=4096, seed=2**31 - 1) == LoraSettings(512, 4096, 2**31 - 1)
    for wrong in ({"rank": 0}, {"rank": 513}, {"alpha": 0}, {"alpha": 4097}, {"seed": -1}, {"seed": 2**31}):
        with pytest.raises(ValidationError):
            lora(**wrong)


def test_they_stay_plain_frozen_values() -> None:
    assert insitu.types.StepSettings is StepSettings
    assert StepSettings(1e-3, "grpo") == StepSettings(learning_rate=1e-3, loss="grpo")
    assert replace(StepSettings(), beta=0.1).beta == 0.1
    assert list(asdict(StepSettings())) == NAMES
    assert len({StepSettings(), StepSettings(), LoraSettings()}) == 2
    assert not issubclass(StepSettings, BaseModel)
    with pytest.raises(AttributeError):
        StepSettings().beta = 1.0  # type: ignore[misc]


def test_they_are_imported_without_pydantic() -> None:
    code = (
        "import sys, insitu.types; print([m for m in ('pydantic', 'torch', 'aiohttp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
