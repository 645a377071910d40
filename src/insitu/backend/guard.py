"""`python -m insitu.backend.guard PARENT_PID COMMAND…`: exec the command, killed when the parent dies."""

from __future__ import annotations

import os
import sys

from insitu.system.processes import die_with_parent


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent()
    if os.getppid() != parent:  # the parent died before the kernel was asked
        sys.exit(f"the parent process {parent} is gone; not starting {command[0]}")
    os.execvp(command[0], command)  # noqa: S606 - the command is built by this package


if __name__ == "__main__":
    main()
