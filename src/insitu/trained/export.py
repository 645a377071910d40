"""Export a step of a run: an adapter as PEFT writes it, or merged weights, with a model card.

The directory is written beside its place and renamed when it is whole.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from insitu.client import InsituClient
from insitu.errors import CannotHonour, Conflict, InvalidRequest, NotFound
from insitu.json_values import JsonObject
from insitu.system.torch_builds.installing import install_command
from insitu.trained.download import download_adapter, read_config
from insitu.trained.model_card import ModelCard
from insitu.trained.run_view import RunView, read_run
from insitu.trained.serve_command import adapter_command, merged_command
from insitu.trained.training_record import read_record
from insitu.types import parse_policy
from insitu.wire.answers import CheckpointInfo
from insitu.wire.starts.adapter_files import CONFIG

_BASE = "base_model_name_or_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The form of an export, and facts that only the user knows."""

    merged: bool = False
    base_model: str | None = None
    """Directory or hub id; None: as the checkpoint names it."""
    dtype: str | None = None
    """Of merged weights; None: the base model's own."""
    licence: str | None = None
    output: Path | None = None
    """The output directory of `insitu finetune`, for data, reward and figures."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A written directory, and how to serve it."""

    run: str
    step: int
    kind: str
    """`adapter` or `merged`."""
    directory: str
    base_model: str
    manifest_sha256: str
    """Of the checkpoint that it was made from."""
    files: dict[str, int]
    """Sizes in bytes."""
    command: list[str]
    """Serves it with vLLM."""

    @property
    def shell_command(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.command)

    def to_dict(self) -> JsonObject:
        """Return it for programs, in the shape that docs/serve.md documents."""
        return {**asdict(self), "files": {**self.files}, "command": [*self.command]}


async def export(client: InsituClient, version: str, directory: Path, options: ExportOptions) -> Exported:
    """Write the weights of `<run>@<step>`, or of a run's last step, into a new directory."""
    name, step = parse_policy(version)
    view = await read_run(client, name)
    checkpoint = _kept(view, view.run.step if step is None else step)
    record = None
    if options.output is not None:
        record = await asyncio.to_thread(read_record, options.output, name, checkpoint.step)
    with _whole(directory) as (staging, target):
        adapter = staging / "adapter" if options.merged else staging
        config = await download_adapter(client, checkpoint, adapter)
        base = options.base_model or config.base_model or view.run.base_model
        if options.merged:
            await asyncio.to_thread(_merge, base, adapter, staging, options.dtype, name, checkpoint.step)
            command = merged_command(name, target, options.dtype)
        else:
            if options.base_model is not None:
                _name_base(adapter, options.base_model)
            command = adapter_command(name, target, base, config.rank)
        given = (options.merged, options.licence, record, shlex.join(command))
        (staging / "README.md").write_text(ModelCard(view, checkpoint.step, base, *given).text())
        files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
    kind = "merged" if options.merged else "adapter"
    digest = checkpoint.manifest_sha256
    return Exported(name, checkpoint.step, kind, str(target), base, digest, files, command)


@contextmanager
def _whole(directory: Path) -> Generator[tuple[Path, Path]]:
    """Yield a scratch directory, and the one that it becomes when the block succeeds."""
    target = directory.absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise Conflict(f"{target} exists already", hint="name a directory that is new or empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as on_failure:
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        on_failure.callback(shutil.rmtree, staging)
        yield staging, target
        staging.chmod(0o755)
        staging.rename(target)  # replaces an empty directory
        on_failure.pop_all()


def _name_base(adapter: Path, base_model: str) -> None:
    """Let the adapter's configuration name the base model as this machine has it."""
    content = {**read_config(adapter), _BASE: base_model}
    (adapter / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _merge(base: str, adapter: Path, target: Path, dtype: str | None, run: str, step: int) -> None:
    try:
        from insitu.training.model.merge import merge
    except ModuleNotFoundError as error:
        raise CannotHonour(
            f"merged weights are made with torch, and this installation has no {error.name}",
            hint=f"{install_command('insitu[backend-cpu]')} (or 'insitu[backend]' with a GPU); "
            "or leave --merged out",
        ) from error
    merge(base, adapter, target, dtype, run, step)
    shutil.rmtree(adapter)


def _kept(view: RunView, step: int) -> CheckpointInfo:
    for checkpoint in view.checkpoints:
        if checkpoint.step == step:
            return checkpoint
    name = view.run.name
    if step == 0:
        raise InvalidRequest(
            f"{name}@0 is the base model {view.run.base_model} itself", hint="name a trained step"
        )
    kept = ", ".join(str(checkpoint.step) for checkpoint in view.checkpoints) or "none"
    raise NotFound(
        f"step {step} of run {name!r} is not kept; kept are {kept}",
        hint=f"name a kept step, and pin the ones to keep: PUT /v1/runs/{name}/checkpoints/STEP/pin",
    )
