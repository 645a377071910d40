"""Start: registers a run with what it starts from, and uploads that if it is a directory beside the agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from insitu.client import InsituClient
from insitu.errors import NotFound
from insitu.harness.interfaces.settings import BackendSettings
from insitu.types import LoraSettings, parse_policy
from insitu.wire.answers import RunInfo
from insitu.wire.starts.adapter_upload import AdapterUpload, read_adapter
from insitu.wire.values import UPLOADED

READY_SECONDS = 1800.0
"""A model may have to be downloaded and compiled before the run is ready."""


@asynccontextmanager
async def served_adapter(
    backend: BackendSettings, client: InsituClient, directory: Path
) -> AsyncGenerator[str]:
    """Serve an adapter that PEFT wrote as step 0 of a run named by its hash; close that run afterwards.

    `directory` is absolute.
    """
    upload = await asyncio.to_thread(read_adapter, directory)
    name = f"adapter-{upload.sha256[:16]}"
    changes = {"name": name, "init_from": str(directory), "fork_from": None}
    await Start(backend.model_copy(update=changes), client).register(None)
    try:
        await client.wait_run_ready(name, READY_SECONDS)
        yield name
    finally:
        await client.close_run(name)


class Start:
    """The registration of one run."""

    def __init__(self, backend: BackendSettings, client: InsituClient) -> None:
        self._backend = backend
        self._client = client

    @property
    def text(self) -> str | None:
        """Step 0 as it was configured; None: the base model."""
        return self._backend.init_from or self._backend.fork_from

    async def register(self, lora: LoraSettings | None) -> RunInfo:
        """Register the run. A directory is uploaded only if the backend does not have it."""
        upload = await self._upload()
        try:
            return await self._register(lora, upload)
        except NotFound:
            if upload is None:
                raise
        await self._client.put_adapter(upload)
        return await self._register(lora, upload)

    async def check(self) -> None:
        """Raise if a run that is not registered yet could not start from what is configured."""
        if self.text is None:
            return
        try:
            await self._client.get_run(self._backend.name)
        except NotFound:
            if await self._upload() is None and not self.text.startswith(UPLOADED):
                await self._check_step(self.text)

    async def _check_step(self, text: str) -> None:
        name, step = parse_policy(text)
        try:
            kept = [checkpoint.step for checkpoint in await self._client.checkpoints(name)]
        except NotFound as error:
            raise NotFound(
                f"the backend has no run {name!r} to start from: {text}",
                hint="`insitu runs list` shows its runs; correct backend.init_from or backend.fork_from",
            ) from error
        if (step is None and not kept) or (step is not None and step not in kept):
            raise NotFound(
                f"{text} is not kept on the backend; of run {name} it has {kept or 'no step'}",
                hint="correct trainer_adapters.<name>.backend.init_from or .fork_from",
            )

    async def _upload(self) -> AdapterUpload | None:
        directory = self._backend.init_directory
        return None if directory is None else await asyncio.to_thread(read_adapter, directory)

    async def _register(self, lora: LoraSettings | None, upload: AdapterUpload | None) -> RunInfo:
        backend = self._backend
        return await self._client.register_run(
            backend.name,
            backend.base_model,
            project=backend.project,
            lora=lora,
            engine_args=backend.engine_args,
            init_args=backend.init_args,
            init_from=backend.init_from if upload is None else upload.init_from,
            fork_from=backend.fork_from,
        )
