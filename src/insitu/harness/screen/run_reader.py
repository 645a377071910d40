"""RunReader: read-only access to the rollouts of a run directory, even while the run is active."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from insitu.config.load import load_config
from insitu.errors import InvalidRequest, NotFound
from insitu.harness.files.rollout_store import read_rollouts
from insitu.harness.files.run_directory import CONFIG_FILE, DROPPED, TRAJECTORIES
from insitu.harness.interfaces.settings import GATEWAY_PORT
from insitu.harness.rollouts.fields import texts
from insitu.harness.rollouts.rollout import Rollout
from insitu.json_values import JsonObject, as_object, parse_json
from insitu.system.keys import key_of
from insitu.workflow.binding import gateway_root

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A rollout and the file it is in."""

    store: str
    """`epoch-0003`, `validation-0005`; with the suffix `-failed-1` when it was run again."""
    rollout: Rollout


class RunReader:
    """The files of one run."""

    def __init__(self, path: Path, config: JsonObject, run_id: str, keys: Mapping[str, str]) -> None:
        self.path = path
        self.run_id = run_id
        self._config = config
        self._keys = keys
        """By entry of `llms`; known only from a configuration file."""

    @classmethod
    def open(cls, run: Path) -> RunReader:
        """Open a run directory, or the `finetuning.output_dir` of a configuration file."""
        path, keys = _of_config_file(run) if run.is_file() else (run, {})
        file = path / CONFIG_FILE
        if not file.is_file() or not (path / TRAJECTORIES).is_dir():
            raise _no_run(run, path)
        try:
            known = as_object(parse_json(file.read_bytes())) or {}
        except ValueError:
            known = {}
        config = as_object(known.get("config"))
        if config is None or "run_id" not in known:
            raise InvalidRequest(f"{file} is not the configuration of a run of insitu")
        return cls(path, config, str(known["run_id"]), keys)

    def stores(self) -> list[str]:
        """Return the names of all rollout files."""
        return sorted(file.stem for file in (self.path / TRAJECTORIES).glob("*.jsonl"))

    def rollouts(self, stores: list[str]) -> Iterator[Found]:
        """Yield the rollouts of these files, ordered by example and generation."""
        for store in stores:
            rollouts = read_rollouts(self._file(store))
            for rollout in sorted(rollouts, key=lambda rollout: (rollout.index, rollout.generation)):
                yield Found(store, rollout)

    def find(self, rollout: str) -> Found:
        """Find the rollout with this id, or the only one whose id contains it (`e3.0.1`, its last digits).

        Whole parts between dots come first: `e3` is an epoch, not digits at the end of another id.
        """
        matches = [found for found in self.rollouts(self.stores()) if rollout in found.rollout.rollout_id]
        parts = [found for found in matches if f".{rollout}." in f".{found.rollout.rollout_id}."]
        matches = parts or matches
        exact = [found for found in matches if found.rollout.rollout_id == rollout]
        if len(matches) == 1 or exact:
            return (exact or matches)[-1]
        listed = ", ".join(found.rollout.rollout_id for found in matches[:_MAX_NAMED])
        if not matches:
            stores = ", ".join(self.stores()) or "nothing yet"
            raise NotFound(
                f"no rollout of {self.path} has {rollout!r} in its id; it has rollouts of {stores}",
                hint=f"see them with `insitu trajectories list {shlex.quote(str(self.path))}`",
            )
        raise InvalidRequest(
            f"{len(matches)} rollouts have {rollout!r} in their id: {listed}"
            f"{', …' if len(matches) > _MAX_NAMED else ''}",
            hint="write more of it",
        )

    def group(self, found: Found) -> list[Rollout]:
        """Return all rollouts of the same example in the same file."""
        rollouts = [each.rollout for each in self.rollouts([found.store])]
        return [rollout for rollout in rollouts if rollout.index == found.rollout.index]

    def dropped(self, store: str) -> dict[str, str] | None:
        """Return why rollouts of an epoch were dropped, by id; None before that is decided."""
        file = self.path / DROPPED / f"{store}.json"
        return texts(parse_json(file.read_bytes())) if file.is_file() else None

    def gateway(self) -> tuple[str, str] | None:
        """Return address and key of the gateway that serves the trained model; no other is ever contacted."""
        finetuning = _section(self._config, "finetuning")
        backend = _section(
            self._config, "trainer_adapters", str(finetuning.get("trainer_adapter")), "backend"
        )
        names = (backend.get("name"), backend.get("base_model"))
        llms = _section(self._config, "llms")
        target = finetuning.get("target_model")
        chosen = [name for name in llms if target in (None, name)]
        trained = [name for name in chosen if _section(llms, name).get("model_name") in names]
        keys = [self._keys[name] for name in trained if self._keys.get(name)]
        key = keys[0] if keys else key_of()
        for name in trained:
            if url := _section(llms, name).get("base_url"):
                return gateway_root(str(url)), key
        scheme = "https" if backend.get("tls") else "http"
        return (f"{scheme}://{backend['ip']}:{GATEWAY_PORT}", key) if backend.get("ip") else None

    def _file(self, store: str) -> Path:
        return self.path / TRAJECTORIES / f"{store}.jsonl"


def _section(config: JsonObject, *path: str) -> JsonObject:
    """Return a section of the configuration, empty if missing."""
    found = config
    for name in path:
        found = as_object(found.get(name)) or {}
    return found


def _of_config_file(file: Path) -> tuple[Path, dict[str, str]]:
    config = load_config(file).config
    keys = {name: llm.api_key.get_secret_value() for name, llm in config.llms.items()}
    return config.finetuning.output_dir, keys


def _no_run(given: Path, path: Path) -> NotFound:
    if not path.exists():
        what = (
            f"{path} does not exist"
            if given == path
            else f"{path}, the output_dir of {given}, does not exist"
        )
    else:
        what = f"{path} is no run of `insitu finetune`: it has no {CONFIG_FILE} and {TRAJECTORIES}/"
    nearby = path if path.is_dir() else path.parent
    runs = [
        file.parent
        for file in sorted(nearby.glob(f"*/{CONFIG_FILE}"))
        if (file.parent / TRAJECTORIES).is_dir()
    ]
    if runs:
        return NotFound(what, hint=f"runs near it: {', '.join(map(str, runs[:_MAX_NAMED]))}")
    if given != path:
        return NotFound(what, hint=f"start the run: insitu finetune --config_file={shlex.quote(str(given))}")
    return NotFound(what, hint="name the finetuning.output_dir of a run, or its configuration file")
