from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from insitu.moved import MOVED


@pytest.mark.parametrize("former", sorted(MOVED))
def test_former_module_names_still_import(former: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, former, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{former} is now {MOVED[former]}"):
        module = importlib.import_module(former)
    assert module is importlib.import_module(MOVED[former])
    monkeypatch.delitem(sys.modules, former)


def test_former_names_give_the_classes_of_today() -> None:
    """In a process of its own, as a plugin written for the former names starts."""
    script = (
        "from insitu.evaluation.items import EvalItem as a\n"
        "from insitu.harness.loop import EpochTrainer as b\n"
        "from insitu.harness.trainer import Trainer as c\n"
        "from insitu import EvalItem\n"
        "from insitu.harness.interfaces.trainer import Trainer\n"
        "assert a is EvalItem and c is Trainer and issubclass(b, Trainer)\n"
    )
    command = [sys.executable, "-W", "default::DeprecationWarning", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("DeprecationWarning") == 4  # the package, and three modules
