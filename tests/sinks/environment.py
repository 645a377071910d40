"""The environment of `make sinks`: the libraries of all sinks, in a venv outside any checkout.

python -m tests.sinks.environment      # builds it when it is missing, and prints its Python
"""

from __future__ import annotations

from pathlib import Path

from tests.compat.environment import ROOT, Environment

SINKS = Environment("sinks", plugin=ROOT, folder=Path(__file__).parent, target="sinks")

if __name__ == "__main__":
    SINKS.build()
    print(SINKS.program())
