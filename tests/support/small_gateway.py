"""The gateway process with smaller limits, so that a few clients fill it.

Everything else is as `python -m insitu.gateway` does it. The limits come from the environment, as JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

from insitu.gateway import process
from insitu.gateway.shared.settings import Limits, Settings

LIMITS = "STANDIN_LIMITS"
MODULE = "tests.support.small_gateway"


def _small(arguments: list[str]) -> Settings:
    return replace(_settings_from(arguments), limits=replace(Limits(), **json.loads(os.environ[LIMITS])))


if __name__ == "__main__":
    _settings_from, process.settings_from = process.settings_from, _small
    process.main()
