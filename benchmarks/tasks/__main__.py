"""Print the held-out examples of a task as JSON, or those to train on.

python -m benchmarks.tasks tictactoe --seed 0 > held_out.json
"""

from __future__ import annotations

import argparse
import importlib
import json

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("task", choices=["guess", "tictactoe", "search", "sql"])
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--split", choices=["train", "held_out"], default="held_out")
options = parser.parse_args()
rows = importlib.import_module(f"benchmarks.tasks.{options.task}").rows(options.seed, options.split)
print(json.dumps(rows, indent=1))
