"""The gateway process without durable recording, for benchmarks/gateway.py to compare with.

Calls are recorded as usual, but an answer waits neither for the journal nor for the note of its rollout, so
`kill -9` loses calls. Everything else is as `python -m insitu.gateway` does it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from insitu.gateway import process
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.recording.tally import Tally
from insitu.types import ModelCall


def _keep_nothing(_recorder: Recorder, _call: ModelCall) -> bool:
    return True


def _count_unawaited(recorder: Recorder, tally: Tally) -> None:
    with recorder._wake:
        recorder._put(tally)


if __name__ == "__main__":
    Recorder._keep = _keep_nothing
    Recorder.count = _count_unawaited
    process.main()
