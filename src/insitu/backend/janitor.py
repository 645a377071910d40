"""`python -m insitu.backend.janitor SERVE_ID SCRATCH`: clean up once the supervisor is gone.

The supervisor holds the other end of standard input. A line means that it cleaned up itself; end of file
without one means that it was killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from insitu.system.processes import end_marked, remove_tree

_DEADLINE_SECONDS = 10.0


def main() -> None:
    serve_id, scratch = sys.argv[1], Path(sys.argv[2])
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # must outlive whatever ends the supervisor
    sys.stdin.readline()
    end_marked(serve_id, _DEADLINE_SECONDS)
    remove_tree(scratch)


if __name__ == "__main__":
    main()
