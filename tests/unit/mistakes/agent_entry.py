"""Mistakes in the agent."""

from __future__ import annotations

from tests.unit.mistakes.desk import Desk, Mistake, Provoke, config, text

GRAPH = """
class StateGraph:
    pass
StateGraph.__module__ = "langgraph.graph.state"
run = StateGraph()
"""
CLIENT = """
async def create():
    return "an answer"


def run(question):
    answer = create()
    try:
        return answer.choices[0]
    finally:
        answer.close()
"""


def rolled_out(source: str, **changes: object) -> Provoke:
    """An agent that is wrong only when it runs."""

    def provoke(desk: Desk):
        desk.write("agent.py", source)
        desk.configure(**changes)
        return desk.roll_out()

    return provoke


MISTAKES = [
    Mistake(
        "a file name instead of an entry",
        config(agent="agent.py"),
        "should be module:function",
        "agent.py",
        "module:function",
    ),
    Mistake(
        "the module is missing",
        config(agent="my_agent:run"),
        "there is no module `my_agent`",
        "my_agent:run",
        "run from the directory",
    ),
    Mistake(
        "the function is misspelt",
        config(agent="agent:rum"),
        "has no `rum`",
        "agent:rum",
        "did you mean `run`",
    ),
    Mistake(
        "a package is not installed",
        text("agent.py", "import no_such_package\n"),
        "No module named 'no_such_package'",
        "agent:run",
        "python -c 'import agent'",
    ),
    Mistake(
        "the file has a syntax error",
        text("agent.py", "def run(question:\n"),
        "SyntaxError",
        "agent:run",
        "python -c 'import agent'",
    ),
    Mistake(
        "the module starts the program",
        text("agent.py", "import sys\nsys.exit(2)\n"),
        "SystemExit",
        "agent:run",
        "python -c 'import agent'",
    ),
    Mistake(
        "a graph instead of a function",
        text("agent.py", GRAPH),
        "is a StateGraph, not a function",
        "agent:run",
        "async def run(question, context):",
    ),
    Mistake(
        "a class instead of a function",
        text("agent.py", "class run:\n    pass\n"),
        "is a class",
        "agent:run",
        "name a function",
    ),
    Mistake(
        "it streams its answer",
        text("agent.py", "async def run(question):\n    yield 'a'\n"),
        "is a generator",
        "agent:run",
        "return it instead of yielding",
    ),
    Mistake(
        "three parameters",
        text("agent.py", "def run(question, llm, tools):\n    return ''\n"),
        "cannot be called with (input) or (input, context)",
        "agent:run",
        "`args`",
    ),
    Mistake(
        "an async client in a blocking agent",
        rolled_out(CLIENT),
        "was not awaited",
        "'coroutine' object has no attribute 'choices'",
        "`async def`",
    ),
    Mistake(
        "a blocking client in an async agent",
        rolled_out("async def run(q):\n    return await str(q)\n"),
        "is not asynchronous",
        "can't be used in 'await'",
        "drop `await`",
    ),
    Mistake(
        "it returns an object",
        rolled_out("def run(q):\n    return object()\n"),
        "that is not JSON",
        "object",
        "return text, numbers, lists and dicts",
    ),
    Mistake(
        "it ends the program",
        rolled_out("def run(q):\n    raise SystemExit(3)\n"),
        "called sys.exit",
        "sys.exit(3)",
        "return a value",
    ),
    Mistake(
        "a framework that is misspelt",
        rolled_out("def run(q, context):\n    return context.client('lang_chain')\n"),
        "there is no client",
        "lang_chain",
        "did you mean `langchain`",
    ),
    Mistake(
        "a model that is not in the file",
        rolled_out("def run(q, context):\n    return context.llm('judge')\n"),
        "llms has no `judge`",
        "judge",
        "known: policy",
    ),
    Mistake(
        "a program that is not there",
        config(agent={"command": ["./my-agent"]}),
        "there is no program",
        "./my-agent",
        "chmod +x",
    ),
    Mistake(
        "a service that is not there",
        rolled_out("", agent="http://127.0.0.1:9/run"),
        "cannot connect",
        "http://127.0.0.1:9/run",
        "start the service",
    ),
]
