"""The way into the Ray cluster that `insitu serve` starts: from this machine, with this backend's token.

Whoever is let into a Ray cluster can run code in it. Ray binds its ports to every interface unless the node's
address is loopback, and keeps a token of its own making in a file of the home directory that all users can
read.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ray._private import ray_constants
from ray._raylet import (
    AuthenticationMode,  # pyright: ignore[reportAttributeAccessIssue] - compiled
    AuthenticationTokenLoader,  # pyright: ignore[reportAttributeAccessIssue] - compiled
    Config,  # pyright: ignore[reportAttributeAccessIssue] - compiled
    get_authentication_mode,  # pyright: ignore[reportAttributeAccessIssue] - compiled
)

LOOPBACK = "127.0.0.1"
TOKEN_FILE = "ray.token"  # noqa: S105 - a file's name


def close_door(state_dir: Path) -> None:
    """Prepare this process and its children to start a cluster on loopback, behind a new token."""
    token_file = state_dir / TOKEN_FILE
    _write_private(token_file, secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # would be used instead of the file
    # Ray replaces a loopback address by a reachable one where it supports clusters.
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    # Children read the environment when they import Ray; here that has happened already.
    ray_constants.ENABLE_RAY_CLUSTER = False
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def asks_for_token() -> bool:
    """Return True if the cluster that this process has joined lets nobody in without its token."""
    return get_authentication_mode() != AuthenticationMode.DISABLED


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # an older file may have other permissions
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
