"""Adapters are uploaded under their hash, checked before they count, and kept for a day."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from insitu.access.projects import Project
from insitu.backend.adapters import disk_share
from insitu.backend.api.settings import Limits
from insitu.backend.ledger import Ledger, adapter_files
from insitu.errors import CannotHonour, InvalidRequest, Overloaded, Unavailable
from insitu.wire.starts.adapter_upload import ADAPTER_TYPE, read_adapter
from tests.support.peft_directory import CONFIG, SHAPES, A, B, safetensors, write_peft

DAY = 24 * 3600


def body_of(weights: bytes, **config: Any) -> bytes:
    return json.dumps({"config": CONFIG | config}).encode() + b"\n" + weights


async def put(
    client: httpx.AsyncClient, body: bytes, digest: str = "", kind: str = ADAPTER_TYPE
) -> httpx.Response:
    digest = digest or hashlib.sha256(body).hexdigest()
    return await client.put(f"/v1/adapters/{digest}", content=body, headers={"Content-Type": kind})


def stored(state_dir: Path) -> list[Path]:
    return sorted((state_dir / "adapters").glob("*"))


async def register(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/runs", json={"name": "new", "base_model": "model", **fields})


async def test_an_adapter_is_stored_once_and_a_run_starts_from_it(
    http: httpx.AsyncClient, tmp_path: Path, ledger: Ledger
) -> None:
    upload = read_adapter(write_peft(tmp_path / "mine"))
    body = b"".join([chunk async for chunk in upload.chunks()])
    assert len(body) == upload.num_bytes
    assert (await register(http, init_from=upload.init_from)).status_code == 404
    for status, created in ((201, True), (200, False)):
        answer = await put(http, body, upload.sha256)
        assert (answer.status_code, answer.json()["created"]) == (status, created)
        assert answer.json()["init_from"] == upload.init_from
        assert answer.json()["lora"] == {"rank": 2, "alpha": 8, "seed": 0, "target_modules": ["q_proj"]}
    (path,) = stored(tmp_path)
    assert (path / "adapter" / "adapter_model.safetensors").read_bytes() == safetensors(SHAPES)
    run = await register(http, init_from=upload.init_from)
    assert run.json()["source"] == upload.init_from
    assert run.json()["lora"]["rank"] == 2
    refused = await register(http, name="other", lora={"rank": 4, "alpha": 8}, init_from=upload.init_from)
    assert refused.status_code == 422
    assert "lora.rank is 2 there, asked 4" in refused.json()["error"]["message"]
    # Registered and started: the upload is not needed any more.
    ledger.commit_start("new", "path", "sha")
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    path.rmdir()
    assert (await register(http, init_from=upload.init_from)).status_code == 200


async def test_a_key_is_needed(stranger: httpx.AsyncClient, tmp_path: Path) -> None:
    assert (await put(stranger, body_of(safetensors(SHAPES)))).status_code == 401
    assert stored(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"some_new_variant": {"on": 1}}, "some_new_variant"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": 1.5}, "lora_alpha"),
    ],
)
async def test_what_is_not_plain_lora_is_refused_by_name_at_both_ends(
    http: httpx.AsyncClient, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    answer = await put(http, body_of(safetensors(SHAPES), **config))
    assert answer.status_code == 422
    assert said in answer.json()["error"]["message"]
    assert stored(tmp_path) == []
    with pytest.raises(CannotHonour, match=said):
        read_adapter(write_peft(tmp_path / "mine", **config))


@pytest.mark.parametrize(
    ("weights", "status", "said"),
    [
        (safetensors(SHAPES)[:-1], 400, "not a whole safetensors file"),
        (safetensors(SHAPES, extra=b"x"), 400, "not a whole safetensors file"),
        (b"\x80\x04\x95pickle", 400, "not a whole safetensors file"),
        (b"", 400, "not a whole safetensors file"),
        ((2**40).to_bytes(8, "little") + b"{}", 400, "its header would have"),
        ((5).to_bytes(8, "little") + b"[1,2]", 400, "no JSON object"),
        ((9).to_bytes(8, "little") + b'{"x":"y"}', 400, "its entry 'x'"),
        (safetensors(SHAPES, "I64"), 422, "has type I64"),
        (safetensors({A: [2, 4]}), 400, "lack lora_A or lora_B"),
        (safetensors({}), 400, "every layer"),
        (safetensors({**SHAPES, "base_model.model.lm_head.weight": [1]}), 422, "lm_head"),
        (safetensors({A: [3, 4], B: [6, 2]}), 400, "does not fit r = 2"),
        (safetensors({A: [2, 4], B: [2, 6]}), 400, "does not fit r = 2"),
    ],
)
async def test_weights_are_checked_before_they_count(
    http: httpx.AsyncClient, tmp_path: Path, weights: bytes, status: int, said: str
) -> None:
    answer = await put(http, body_of(weights))
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    assert stored(tmp_path) == []


async def test_overlapping_tensors_are_refused(http: httpx.AsyncClient) -> None:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    head = json.dumps({A: entry, B: entry}).encode()
    answer = await put(http, body_of(len(head).to_bytes(8, "little") + head + bytes(16)))
    assert "are not where its type and shape say" in answer.json()["error"]["message"]


async def test_other_hashes_types_and_sizes_are_refused(
    http: httpx.AsyncClient, tmp_path: Path, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = body_of(safetensors(SHAPES))
    answer = await put(http, body, "0" * 64)
    assert (answer.status_code, "has the SHA-256" in answer.text) == (400, True)
    assert (await put(http, body, "A" * 64)).status_code == 400
    assert (await put(http, body, kind="application/json")).status_code == 400
    assert (await put(http, b"no line" + bytes(300 * 2**10))).status_code == 413
    assert (await put(http, b'{"config": 1}\n')).status_code == 400

    async def pieces() -> Any:
        yield body

    headers = {"Content-Type": ADAPTER_TYPE}
    unannounced = await http.put(f"/v1/adapters/{'0' * 64}", content=pieces(), headers=headers)
    assert (unannounced.status_code, "not announced" in unannounced.text) == (400, True)
    limits = Limits(max_adapter_bytes=len(body) - 1)
    monkeypatch.setattr(app.state.services, "limits", limits)
    assert (await put(http, body)).status_code == 413
    assert stored(tmp_path) == []


async def test_a_full_disk_takes_no_adapter(
    http: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.backend.adapters.disk_share.LEAST_FREE_BYTES", 2**60)
    answer = await put(http, body_of(safetensors(SHAPES)))
    assert (answer.status_code, "MiB free" in answer.text) == (503, True)
    assert stored(tmp_path) == []


async def test_a_project_leaves_room_for_the_adapters_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended disk with room for twelve adapters beyond what a step needs."""
    size = 2**20
    least_free = disk_share.LEAST_FREE_BYTES
    usage = SimpleNamespace(free=least_free + 12 * size)
    monkeypatch.setattr(disk_share.shutil, "disk_usage", lambda _path: usage)
    share = disk_share.DiskShare(tmp_path)
    hog, other, operator = Project("hog"), Project("other"), Project(None)
    async with AsyncExitStack() as under_way:
        for _ in range(8):  # two thirds of what is free
            await under_way.enter_async_context(share.reserved(hog, size))
        with pytest.raises(Overloaded, match="take 8 MiB of the backend's disk, its share"):
            await under_way.enter_async_context(share.reserved(hog, size))
        async with share.reserved(other, size), share.reserved(operator, 2 * size):
            with pytest.raises(Unavailable, match="too little for this adapter"):
                await under_way.enter_async_context(share.reserved(operator, 2 * size))
    weights = tmp_path / "adapters" / "hog~digest" / adapter_files.WEIGHTS
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(8 * size))
    usage.free -= 8 * size
    with pytest.raises(Overloaded, match="goes after a day"):
        async with share.reserved(hog, size):
            pass
    async with share.reserved(other, size):
        pass


async def test_uploads_that_nothing_starts_from_go_after_a_day(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    bodies = [body_of(safetensors(SHAPES), lora_alpha=alpha) for alpha in (1, 2, 3, 4)]
    old, awaited, renewed, young = [hashlib.sha256(body).hexdigest() for body in bodies]
    for body in bodies:
        assert (await put(http, body)).status_code == 201
    await register(http, init_from=f"sha256:{awaited}")
    for digest in (old, awaited, renewed):
        os.utime(tmp_path / "adapters" / digest, (time.time() - DAY - 60,) * 2)
    os.utime(tmp_path / "adapters" / renewed, (time.time() - DAY + 60,) * 2)
    assert (await put(http, bodies[2])).status_code == 200
    assert {path.name for path in stored(tmp_path)} == {awaited, renewed, young}
    assert (tmp_path / "adapters" / renewed).stat().st_mtime > time.time() - 60


async def test_two_starts_are_refused(http: httpx.AsyncClient) -> None:
    for fields in ({"init_from": "run@1", "fork_from": "run@1"}, {"init_from": "../x"}, {"fork_from": "A@1"}):
        assert (await register(http, **fields)).status_code == 400
    assert (await register(http, fork_from="sha256:" + "0" * 64)).status_code == 400


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    path = write_peft(tmp_path / "mine")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(InvalidRequest, match=r"has no adapter_model.safetensors") as refused:
        read_adapter(path)
    assert "adapter_model.bin" in refused.value.hint
    (path / "adapter_config.json").write_text("[")
    (path / "adapter_model.bin").rename(path / "adapter_model.safetensors")
    with pytest.raises(InvalidRequest, match="is not JSON"):
        read_adapter(path)


def test_an_upload_that_never_ended_goes_at_the_next_start(tmp_path: Path) -> None:
    staging = adapter_files.stage(tmp_path)
    assert adapter_files.remove_unused(tmp_path, set()) == [], "it may be under way"
    assert adapter_files.remove_unused(tmp_path, set(), interrupted=True) == [staging]
    assert stored(tmp_path) == []
