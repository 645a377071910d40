"""RunDirectory: `finetuning.output_dir`, all files of one run, used by one process at a time.

    config.json          the effective configuration without secrets, and the run's id
    journal.jsonl        the run's events
    trajectories/        every rollout; per epoch (or step) and validation a file of lines and one of tokens
    ahead/               rollouts of groups that no step has used yet (asynchronous)
    left_out/            which of an epoch's or a step's rollouts were not trained on, and why
    tokens/              the trainer's log-probability and advantage of every token, a file per step
    sinks/               how far each sink has got, and the run's id there
    …                    metrics and the plot, derived from the journal

The same configuration resumes the run that it finds there. A different one is rejected, unless that run has
recorded nothing.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Self

import orjson

from insitu.config.differences import differences, fingerprint
from insitu.errors import Conflict, InvalidRequest, describe
from insitu.harness.files.ahead_stores import AHEAD, AheadStores
from insitu.harness.files.journal import Journal
from insitu.harness.files.rollout_store import RolloutStore, free_name, move_rollouts, remove_rollouts
from insitu.harness.files.trained_tokens import TOKENS_FOLDER, tokens_file
from insitu.harness.files.watcher import RunWatcher
from insitu.json_values import JsonObject, as_object, parse_json
from insitu.system.durable import Closing, make_directories, write_atomic

CONFIG_FILE = "config.json"
JOURNAL_FILE = "journal.jsonl"
TRAJECTORIES = "trajectories"
DROPPED = "left_out"
SINKS = "sinks"
DERIVED_FILES = (
    "training_metrics.jsonl",
    "steps.jsonl",
    "alarms.jsonl",
    "reward_history.json",
    "validation_history.json",
    "curriculum_state.json",
    "reward_plot.png",
)
_OWN_NAMES = (CONFIG_FILE, JOURNAL_FILE, TRAJECTORIES, AHEAD, DROPPED, TOKENS_FOLDER, SINKS, *DERIVED_FILES)
_BEFORE_RESULTS = ("inputs", "registered")
"""Events of a run that has not begun to roll out."""
EPOCH_NAME = re.compile(r"epoch-\d+(-step-\d+)?")
_STORE_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


class RunDirectory(Closing):
    """Created by `open`; holds the directory's lock until `close`."""

    def __init__(self, path: Path, run_id: str, journal: Journal, lock: IO[str], *, resumed: bool) -> None:
        self.path = path
        self.run_id = run_id
        self.journal = journal
        self.resumed = resumed
        """True if the run had been started before."""
        self._lock = lock
        self._watcher = RunWatcher()
        self._stores: dict[str, RolloutStore] = {}
        self.ahead = AheadStores(path / AHEAD, path / TRAJECTORIES)
        """The groups that no step has used yet."""

    @classmethod
    def open(cls, path: Path, dump: JsonObject) -> Self:
        """Start or resume the run of a configuration, given as the output of `dump_config`.

        Raises Conflict when another process uses the directory, or it belongs to something else.
        """
        _make(path)
        lock = _take_lock(path)
        with ExitStack() as opening:
            opening.callback(lock.close)
            known = _read_config(path)
            if known is None:
                _check_free(path)
            elif not _same(known, dump):
                if _has_results(path):
                    raise _other_run(path, known, dump)
                _clear(path)
                known = None
            run_id = str(known["run_id"]) if known else f"run_{secrets.token_hex(4)}"
            _write_config(path, run_id, dump, known)
            journal = Journal(path / JOURNAL_FILE)
            opening.pop_all()
        return cls(path, run_id, journal, lock, resumed=known is not None)

    def watch(self, watcher: RunWatcher) -> None:
        """Tell `watcher` of everything that is written from now on."""
        self._watcher = self.journal.watcher = watcher

    def store(self, name: str) -> RolloutStore:
        """Open the rollouts of an epoch, a step or a validation, e.g. `epoch-0003`.

        Returns the same object while it is open; the caller closes it when done with them.
        """
        if not _STORE_NAME.fullmatch(name):
            raise InvalidRequest(f"no file of rollouts can be called {name!r}", hint="like epoch-0003")
        # Forget closed stores: keeping the index of every epoch would grow with the run.
        self._stores = {other: store for other, store in self._stores.items() if not store.closed}
        store = self._stores.get(name)
        if store is None:
            make_directories(self.path / TRAJECTORIES)
            path = self.path / TRAJECTORIES / f"{name}.jsonl"
            on_stored = functools.partial(self._watcher.stored, name)
            store = self._stores[name] = RolloutStore(path, on_stored)
        return store

    def discard(self, name: str) -> None:
        """Remove the rollouts of a step that was not formed to the end; its groups have their own stores."""
        remove_rollouts(self.path / TRAJECTORIES / f"{name}.jsonl")

    def write_dropped(self, name: str, reasons: Mapping[str, str]) -> None:
        """Record why rollouts of an epoch or a step were dropped, by id; those not listed are trained on."""
        make_directories(self.path / DROPPED)
        write_atomic(self.path / DROPPED / f"{name}.json", orjson.dumps(reasons))

    def write_tokens(self, step: int, content: bytes) -> None:
        """Keep the trainer's figures of a step's tokens."""
        make_directories(self.path / TOKENS_FOLDER)
        write_atomic(tokens_file(self.path, step), content)

    def store_names(self) -> list[str]:
        """Return the names of all stored epochs, steps and validations."""
        return sorted(file.stem for file in (self.path / TRAJECTORIES).glob("*.jsonl"))

    def set_aside(self, name: str, why: str = "failed") -> Path:
        """Rename, and so keep, the rollouts of an epoch, a step or a validation that is to be run again."""
        path = self.store(name).path
        self._stores.pop(name).close()
        aside = free_name(path.parent, name, why)
        if (dropped := self.path / DROPPED / f"{name}.json").exists():
            dropped.rename(dropped.with_stem(aside.stem))
        move_rollouts(path, aside)
        return aside

    def close(self) -> None:
        """Close all files and release the lock; idempotent."""
        try:
            for store in self._stores.values():
                store.close()
            self.journal.close()
        finally:
            self._lock.close()


def epoch_name(epoch: int, step: int | None = None) -> str:
    """Return the name of the files of an epoch, or of one of its steps; both count from 0."""
    name = f"epoch-{epoch:04d}"
    return name if step is None else f"{name}-step-{step:04d}"


def is_epoch_name(name: str) -> bool:
    """Return True for the files of an epoch or a step, False for validations and for what was set aside."""
    return EPOCH_NAME.fullmatch(name) is not None


def _make(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InvalidRequest(
            f"{path} is a file", hint="name a directory: -o finetuning.output_dir <directory>"
        )
    try:
        make_directories(path)
        (path / ".lock").touch()
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be written: {describe(error)}",
            hint="name another directory: -o finetuning.output_dir <directory>",
        ) from error


def _take_lock(path: Path) -> IO[str]:
    """Lock the directory for this process; the kernel releases the lock however the process ends."""
    lock = (path / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise Conflict(
            f"another process (pid {owner}) works in {path}",
            hint="wait for it or stop it, or use another directory: -o finetuning.output_dir <directory>",
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _read_config(path: Path) -> JsonObject | None:
    file = path / CONFIG_FILE
    if not file.exists():
        return None
    try:
        known = as_object(parse_json(file.read_bytes()))
    except ValueError:
        known = None
    if known is None or not {"run_id", "fingerprint", "config"} <= known.keys():
        raise Conflict(f"{file} is not the configuration of a run of insitu", hint=_elsewhere(path))
    return known


def _check_free(path: Path) -> None:
    """Reject a directory where a run would overwrite files; unrelated files are fine."""
    taken = [name for name in _OWN_NAMES if (path / name).exists()]
    if taken:
        raise Conflict(
            f"{path} was not made by insitu, and files of a run would overwrite: {', '.join(taken)}",
            hint=_elsewhere(path),
        )


def _same(known: JsonObject, dump: JsonObject) -> bool:
    # Recompute the old fingerprint: another release may have computed the stored one differently.
    return fingerprint(as_object(known["config"]) or {}) == fingerprint(dump)


def _other_run(path: Path, known: JsonObject, dump: JsonObject) -> Conflict:
    listed = "\n".join(f"    {line}" for line in differences(as_object(known["config"]) or {}, dump))
    return Conflict(
        f"{path} belongs to run {known['run_id']}, which has another configuration:\n{listed}",
        hint=_elsewhere(path),
    )


def _has_results(path: Path) -> bool:
    """Return True if a run has recorded more than that it was going to start."""
    if any(file.stat().st_size for file in (path / TRAJECTORIES).glob("*.jsonl")):
        return True
    if AheadStores(path / AHEAD, path / TRAJECTORIES).has_results():
        return True
    with Journal(path / JOURNAL_FILE) as journal:
        return any(record.get("event") not in _BEFORE_RESULTS for record in journal.records())


def _clear(path: Path) -> None:
    """Remove the files of a run without results, the configuration last."""
    for folder in (TRAJECTORIES, AHEAD):
        for file in (path / folder).glob("*"):
            file.unlink()
    (path / JOURNAL_FILE).unlink()
    (path / CONFIG_FILE).unlink()


def _write_config(path: Path, run_id: str, dump: JsonObject, known: JsonObject | None) -> None:
    started_at = known.get("started_at") if known else time.time()
    content = {
        "run_id": run_id,
        "fingerprint": fingerprint(dump),
        "started_at": started_at,
        "config": dump,
    }
    if content != known:
        write_atomic(path / CONFIG_FILE, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _elsewhere(path: Path) -> str:
    return f"use another directory: -o finetuning.output_dir <directory>; or delete {path} to start over"
