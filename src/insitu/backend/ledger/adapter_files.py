"""Uploaded adapters: directories under ``<state>/adapters``, named by the SHA-256 of their upload.

An upload is whole or absent, as a checkpoint is. It is only a source: a run copies it to its step 0. So it is
removed a day after it came, unless a run is about to start from it.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import orjson

from insitu.access.projects import project_of
from insitu.errors import NotFound
from insitu.system.durable import sync_path
from insitu.types import LoraSettings
from insitu.wire.starts.peft_config import PeftConfig
from insitu.wire.values import UPLOADED

KEPT_SECONDS = 24 * 3600.0
WEIGHTS, CONFIG = "adapter/adapter_model.safetensors", "adapter/adapter_config.json"
_STAGING = ".staging-"


def uploaded_adapter(state_dir: Path, digest: str) -> Path:
    """Return the directory of an uploaded adapter, or raise NotFound."""
    path = _home(state_dir) / digest
    if not path.is_dir():
        raise missing(UPLOADED + digest)
    return path


def missing(name: str) -> NotFound:
    """Return the error of an adapter that is not here."""
    return NotFound(
        f"no adapter {name} was uploaded here, or it has been removed",
        hint=f"upload it: PUT /v1/adapters/{name.removeprefix(UPLOADED)}; uploads are kept for a day",
    )


def uploaded_settings(state_dir: Path, digest: str) -> LoraSettings | None:
    """Return the settings of an uploaded adapter; None if it is not here."""
    try:
        content = (_home(state_dir) / digest / CONFIG).read_bytes()
    except FileNotFoundError:
        return None
    config = PeftConfig.read(orjson.loads(content))
    return LoraSettings(config.rank, config.alpha, target_modules=list(config.target_modules or []))


def stage(state_dir: Path) -> Path:
    """Create an empty private directory for an upload."""
    staging = _home(state_dir) / f"{_STAGING}{uuid.uuid4().hex}"
    (staging / "adapter").mkdir(parents=True, mode=0o700)
    return staging


def commit(staging: Path, digest: str) -> None:
    """Make the staged upload durable and visible under its name."""
    for path in (staging / WEIGHTS, staging / CONFIG, staging / "adapter", staging):
        sync_path(path)
    try:
        staging.rename(staging.with_name(digest))
    except OSError:
        if not staging.with_name(digest).is_dir():
            raise
        shutil.rmtree(staging)  # the same upload came twice at once
    sync_path(staging.parent)
    sync_path(staging.parent.parent)


def stored_bytes(state_dir: Path) -> Counter[str | None]:
    """Return the bytes of the uploads that are here, by project; None: of keys without one."""
    found: Counter[str | None] = Counter()
    for path in _home(state_dir).glob("*"):
        if not path.name.startswith(_STAGING):
            with suppress(FileNotFoundError):  # removed meanwhile
                found[project_of(path.name).name] += (path / WEIGHTS).stat().st_size
    return found


def renew(state_dir: Path, digest: str) -> bool:
    """Keep an upload for another day; return False if it is not there."""
    path = _home(state_dir) / digest
    if not path.is_dir():
        return False
    path.touch()
    return True


def remove_unused(state_dir: Path, awaited: Collection[str], *, interrupted: bool = False) -> list[Path]:
    """Delete uploads older than a day that no run is about to start from; return what was deleted.

    `interrupted`: delete also those that never ended, while none can be under way.
    """
    removed: list[Path] = []
    for path in sorted(_home(state_dir).glob("*")):
        started = path.name.startswith(_STAGING)
        aged = path.stat().st_mtime < time.time() - KEPT_SECONDS
        if UPLOADED + path.name not in awaited and (aged or (started and interrupted)):
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _home(state_dir: Path) -> Path:
    return state_dir / "adapters"
