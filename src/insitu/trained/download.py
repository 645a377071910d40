"""Bring an adapter from the backend to this machine, every file checked by its SHA-256.

ledger ── hash of the manifest ──► manifest.json ── hash of each file ──► configuration, weights
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
from pathlib import Path

from insitu.client import InsituClient
from insitu.errors import CorruptCheckpoint
from insitu.json_values import JsonObject, as_object, parse_json
from insitu.system.files import hashed
from insitu.wire.answers import CheckpointInfo
from insitu.wire.starts.adapter_files import CONFIG, MANIFEST, WEIGHTS, CheckpointFile, in_checkpoint
from insitu.wire.starts.peft_config import PeftConfig


async def download_adapter(client: InsituClient, checkpoint: CheckpointInfo, directory: Path) -> PeftConfig:
    """Write the adapter of a kept checkpoint into a directory as PEFT does; return its settings."""
    await asyncio.to_thread(directory.mkdir, exist_ok=True)
    manifest = io.BytesIO()
    await client.download(checkpoint.run, checkpoint.step, MANIFEST, manifest)
    found = hashlib.sha256(manifest.getvalue()).hexdigest()
    _check(checkpoint, MANIFEST, found, checkpoint.manifest_sha256)
    listed = as_object((as_object(parse_json(manifest.getvalue())) or {}).get("files")) or {}
    for file in (CONFIG, WEIGHTS):
        expected = as_object(listed.get(in_checkpoint(file))) or {}
        await _download(client, checkpoint, file, str(expected.get("sha256", "")), directory / file)
    return PeftConfig.read(read_config(directory))


def read_config(directory: Path) -> JsonObject:
    """Return the content of an adapter's configuration."""
    return as_object(parse_json((directory / CONFIG).read_bytes())) or {}


async def _download(
    client: InsituClient, checkpoint: CheckpointInfo, file: CheckpointFile, sha256: str, target: Path
) -> None:
    with target.open("w+b") as out:
        await client.download(checkpoint.run, checkpoint.step, file, out)
        out.flush()
        os.fsync(out.fileno())
        out.seek(0)
        found, _ = await asyncio.to_thread(hashed, out)
    _check(checkpoint, file, found, sha256)


def _check(checkpoint: CheckpointInfo, file: str, found: str, expected: str) -> None:
    if found != expected:
        raise CorruptCheckpoint(
            f"{file} of {checkpoint.run}@{checkpoint.step} arrived with the SHA-256 {found[:12]}…, "
            f"{expected[:12] or 'none'}… was recorded",
            hint="try again; if it stays so, the file is damaged on the backend: export another step",
        )
