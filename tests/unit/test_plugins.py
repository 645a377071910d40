"""The registry of components."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from insitu import plugins
from insitu.errors import Conflict, InvalidRequest
from insitu.plugins import Component, ComponentConfig, Kind, Section


class Numbers(ComponentConfig):
    whole: int = 1
    real: float | None = None
    flag: bool = False
    either: bool | int = 0


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    plugins.load_entry_points()
    monkeypatch.setattr(plugins, "_components", dict(plugins._components))
    monkeypatch.setattr(plugins, "_loaded", set(plugins._loaded))


class Parts:
    directory = Path()

    def llm(self, name: str) -> Any:
        raise NotImplementedError

    async def evaluator(self, name: str) -> Any:
        raise NotImplementedError


def test_what_is_registered_is_found() -> None:
    @plugins.register(Kind.EVALUATOR, "test_one", Numbers)
    class One:
        pass

    found = plugins.find(Kind.EVALUATOR, "test_one")
    assert (found.make, found.config, found.origin) == (One, Numbers, __name__)
    assert "test_one" in plugins.names(Kind.EVALUATOR)
    assert "test_one" not in plugins.names(Kind.WORKFLOW)


def test_an_unknown_type_is_refused_with_the_nearest() -> None:
    plugins.register(Kind.EVALUATOR, "test_one")(object)
    with pytest.raises(InvalidRequest) as error:
        plugins.find(Kind.EVALUATOR, "test_won")
    assert "no evaluator has the _type `test_won`; did you mean `test_one`?" in error.value.message
    assert "test_one" in error.value.hint
    with pytest.raises(InvalidRequest):
        plugins.find(Kind.WORKFLOW, "test_one")


def test_a_name_belongs_to_one_module() -> None:
    def component(origin: str) -> Component:
        return Component(Kind.DATASET, "test_rows", ComponentConfig, object, origin)

    plugins.add(component("first"))
    plugins.add(component("first"))  # the module was imported again
    with pytest.raises(Conflict, match="registered by first and by second"):
        plugins.add(component("second"))
    assert plugins.find(Kind.DATASET, "test_rows").origin == "first"


def point(value: str) -> tuple[EntryPoint, ...]:
    return (EntryPoint("extra", value, plugins.ENTRY_POINT_GROUP),)


def test_a_package_registers_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "extra_components.py").write_text(
        "from insitu.plugins import Kind, names, register\n"
        "names(Kind.TRAINER)\n"  # asking while being imported must not start the import again
        "@register(Kind.TRAINER, 'test_extra')\n"
        "class Extra: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_points", lambda: point("extra_components"))
    assert plugins.find(Kind.TRAINER, "test_extra").origin == "extra_components"


def test_a_package_that_cannot_be_imported_is_named_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_points", lambda: point("no_such_module_of_components"))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no_such_module_of_components: ModuleNotFoundError"):
            plugins.find(Kind.TRAINER, "anything")


async def test_a_class_is_built_and_closed() -> None:
    events: list[str] = []

    class Closing:
        def __init__(self, config: ComponentConfig, parts: Any) -> None:
            events.append(config.type_name)

        async def aclose(self) -> None:
            events.append("closed")

    component = Component(Kind.WORKFLOW, "test", ComponentConfig, Closing, "here")

    async def use() -> None:
        async with plugins.build(component, ComponentConfig(_type="test"), Parts()) as instance:
            assert isinstance(instance, Closing)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    assert events == ["test", "closed"]


async def test_a_generator_is_built_and_closed() -> None:
    events: list[str] = []

    async def make(config: ComponentConfig, parts: Any) -> AsyncIterator[str]:
        try:
            yield f"instance of {config.type_name}"
        finally:
            events.append("closed")

    component = Component(Kind.WORKFLOW, "test", ComponentConfig, make, "here")
    async with plugins.build(component, ComponentConfig(_type="test"), Parts()) as instance:
        assert instance == "instance of test"
        assert events == []
    assert events == ["closed"]


async def test_an_instance_without_aclose_needs_none() -> None:
    component = Component(Kind.WORKFLOW, "test", ComponentConfig, lambda config, parts: "x", "here")
    async with plugins.build(component, ComponentConfig(_type="test"), Parts()) as instance:
        assert instance == "x"


@pytest.mark.parametrize(
    "values",
    [
        {"whole": True},
        {"real": False},
        {"real": float("nan")},
        {"real": "inf"},
        {"whole": 1.5},
        {"wohle": 1},
    ],
)
def test_a_section_refuses_what_is_no_number_or_unknown(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        Numbers.model_validate({"_type": "x", **values})
    assert "input_value" not in str(error.value)


def test_a_section_takes_numbers_in_every_spelling() -> None:
    read = Numbers.model_validate({"_type": "x", "whole": "2", "real": "1e-6", "flag": "yes", "either": True})
    assert (read.whole, read.real, read.flag, read.either) == (2, 1e-6, True, True)


def test_a_section_does_not_change() -> None:
    class Place(Section):
        name: str = "a"

    with pytest.raises(ValidationError):
        Place().name = "b"  # pyright: ignore[reportAttributeAccessIssue]


def test_nearest() -> None:
    assert plugins.nearest("num_epoch", ["seed", "num_epochs"]) == "; did you mean `num_epochs`?"
    assert plugins.nearest("xyz", ["seed", "num_epochs"]) == ""
    assert plugins.nearest("x", []) == ""
