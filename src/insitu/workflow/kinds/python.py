"""`_type: python`: a function of the user's own code."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from insitu.entry import load_entry
from insitu.given import IN_JSON, KEPT
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.workflow.kinds.function import FunctionWorkflow


class PythonConfig(ComponentConfig):
    """A function by its name."""

    entry: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"), KEPT, IN_JSON]
    """`package.module:function`."""
    llm: str | None = None
    """The entry of `llms` that `context.llm()` returns; by default a trained one, or the only one."""
    args: dict[str, object] = Field(default_factory=dict)
    """Further keyword arguments."""


@register(Kind.WORKFLOW, "python", PythonConfig)
def make_python(config: PythonConfig, parts: Parts) -> FunctionWorkflow:
    """Build the workflow that calls `entry`."""
    return FunctionWorkflow(f"`{config.entry}`", load_entry(config.entry, parts.directory), config.args)
