"""Check a Dockerfile with dockerfile-parse: it parses, its stages build on known ones, its files are there.

make recipes
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser  # pyright: ignore[reportMissingImports]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("file", type=Path)
file: Path = parser.parse_args().file
root = file.resolve().parents[1]
steps: list[dict[str, Any]] = DockerfileParser(path=str(file)).structure
stages: list[str] = []
for step in steps:
    words = step["value"].split()
    if step["instruction"] == "FROM":
        image, _, stage = words
        assert ":" in image or image in stages, f"{file}: FROM {image}: pin a tag, or name an earlier stage"
        stages.append(stage)
    elif step["instruction"] == "COPY":
        missing = [word for word in words[:-1] if not (root / word).exists()]
        assert not missing, f"{file}: COPY: {', '.join(missing)} is not in {root}"
    elif step["instruction"] not in {
        *("CMD", "COMMENT", "ENTRYPOINT", "ENV", "EXPOSE", "RUN", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR")
    }:
        raise SystemExit(f"{file}: unknown instruction {step['instruction']}")
print(f"{file}: {len(steps)} instructions, stages {', '.join(stages)}")
