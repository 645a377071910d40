"""The notebooks of the examples, executed from the first cell to the last in front of a stand-in backend."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples.tools.shop import ITEMS
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.support.standin_tools import StandinToolEngine

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ("deduction", "tictactoe", "tools")
NUM_ROWS = 3
_RANDOM = random.Random(0)


def clerk(messages: list[dict[str, str]]) -> str:
    """Look an item up and repeat the tool's answer, or say nothing useful: rewards must differ."""
    last = messages[-1]
    if last["role"] == "tool":
        return last["content"]
    if _RANDOM.random() < 0.5:
        return "I do not know."
    item = next(item for item in ITEMS if re.search(rf"\b{item}\b", last["content"]))
    return f'<call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</call>'


def player(messages: list[dict[str, str]]) -> str:
    return _RANDOM.choice("123456789")


def guesser(messages: list[dict[str, str]]) -> str:
    return _RANDOM.choice(["Ada, 8", "Ben, 9", "Cleo, 10", "somebody"])


ENGINES: dict[str, StandinEngine] = {
    "deduction": StandinEngine(Behaviour(models=["smollm2"], answers=guesser)),
    "tictactoe": StandinEngine(Behaviour(models=["smollm2"], answers=player)),
    "tools": StandinToolEngine(Behaviour(models=["smollm2"], answers=clerk)),
}


def notebook(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "examples" / name / f"{name}.ipynb").read_text())


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_committed_without_outputs(name: str) -> None:
    cells = notebook(name)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"]]
    assert [cell["metadata"] for cell in code].count({"tags": ["parameters"]}) == 1
    for cell in code:
        if "await " not in (text := "".join(cell["source"])):
            compile(text, cell["id"], "exec")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
async def test_it_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install 'insitu[dev]'")
    nbformat = pytest.importorskip("nbformat", reason="no nbformat: pip install 'insitu[dev]'")
    pytest.importorskip("ipykernel", reason="no ipykernel: pip install 'insitu[dev]'")
    unwanted = shutil.ignore_patterns("output*", "__pycache__")
    folder = shutil.copytree(ROOT / "examples" / name, tmp_path / name, ignore=unwanted)
    for file in (folder / "data").iterdir():
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:NUM_ROWS]))
    backend = StandinBackend(tmp_path / "state", train_seconds=0.01)
    backend.engine = ENGINES[name]
    async with backend:
        book = nbformat.reads(json.dumps(notebook(name)), as_version=4)
        (parameters,) = [cell for cell in book.cells if cell.metadata.get("tags") == ["parameters"]]
        # The stand-in writes one token a character.
        short = {"finetuning": {"num_epochs": 1}, "model": {"max_tokens": 200}}
        parameters.source = f"PORT = {backend.port}\nCHANGES = {short!r}"
        place = {"metadata": {"path": str(folder)}}
        client = nbclient.NotebookClient(book, timeout=200, kernel_name="python3", resources=place)
        await client.async_execute()
    shown = [output.get("text", "") for cell in book.cells for output in cell.get("outputs", ())]
    assert re.search(r"[1-9]\d* updates; held-out reward \S+ before", "".join(shown))
    assert "step   1  mean reward" in "".join(shown)
    pictures = [output for cell in book.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("image/png" in output["data"] for output in pictures)
