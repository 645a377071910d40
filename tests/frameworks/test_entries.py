"""An entry that is an object of a framework: the error says how to wrap it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from langgraph.graph import StateGraph

from insitu.entry import load_entry
from insitu.errors import InvalidRequest


def test_graphs_of_langgraph_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = StateGraph(dict)
    graph.add_node("only", lambda state: state)
    graph.set_entry_point("only")
    module = ModuleType("graph_agent")
    monkeypatch.setitem(sys.modules, "graph_agent", module)
    for found in (graph, graph.compile()):
        module.graph = found  # type: ignore[attr-defined]
        with pytest.raises(InvalidRequest, match=f"is a {type(found).__name__}, not a function") as caught:
            load_entry("graph_agent:graph")
        assert "await graph.ainvoke(" in caught.value.hint
        assert (".compile()" in caught.value.hint) == (found is graph)
