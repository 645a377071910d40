"""Files from outside: no archive is unpacked, no link followed out of its directory, no pickle loaded."""

from __future__ import annotations

import ast
import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import cast

import httpx
import openpyxl
import pytest

from insitu.backend.backup.restore import restore_state
from insitu.datasets import table_rows
from insitu.datasets.dataset_config import FileDatasetConfig
from insitu.datasets.file_dataset import FileDataset
from insitu.errors import InvalidRequest
from insitu.plugins import Parts
from insitu.system.archives import packed_kind
from insitu.wire.starts.adapter_upload import read_adapter
from tests.support.peft_directory import SHAPES, safetensors, write_peft
from tests.unit.api.test_api_adapters import body_of, put, stored

SOURCES = Path(__file__).resolve().parents[3] / "src" / "insitu"


class Exploit:
    """Raises as soon as it is loaded."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was loaded')",))


def zipped(name: str, content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return out.getvalue()


def tarred(name: str, content: bytes, mode: str = "w:", layout: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=layout) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


ROWS = b'[{"id": 1, "question": "2+2", "answer": "4"}]'
PACKED = {
    "zip": (zipped("../d.json", ROWS), "a zip archive"),
    "tar": (tarred("../d.json", ROWS), "a tar archive"),
    "gnu tar": (tarred("d.json", ROWS, layout=tarfile.GNU_FORMAT), "a tar archive"),
    "tar.gz": (tarred("d.json", ROWS, "w:gz"), "a gzip file"),
    "gzip": (gzip.compress(ROWS), "a gzip file"),
    "bzip2": (bz2.compress(ROWS), "a bzip2 file"),
    "xz": (lzma.compress(ROWS), "an xz file"),
    "pickle": (pickle.dumps(Exploit()), "a pickle"),
}
each_kind = pytest.mark.parametrize(("content", "kind"), PACKED.values(), ids=PACKED)


@each_kind
def test_a_start_that_is_an_archive_is_refused(content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "adapter.zip").write_bytes(content)
    with pytest.raises(InvalidRequest, match=f"is {kind}: archives are never unpacked"):
        read_adapter(tmp_path / "adapter.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter.zip"]


@each_kind
def test_weights_that_are_an_archive_or_a_pickle_are_refused(
    content: bytes, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=rf"adapter_model\.safetensors is {kind}"):
        read_adapter(write_peft(tmp_path / "mine", content))


@each_kind
async def test_an_upload_that_is_an_archive_is_refused(
    http: httpx.AsyncClient, tmp_path: Path, content: bytes, kind: str
) -> None:
    answer = await put(http, body_of(content))
    assert answer.status_code == 400
    assert f"it is {kind}" in answer.json()["error"]["message"]
    assert stored(tmp_path) == []


def test_safetensors_whose_length_looks_like_a_pickle_are_taken(tmp_path: Path) -> None:
    """A header of 640 bytes starts with 80 02, as pickles do."""
    whole = safetensors(SHAPES)
    header = whole[8:].partition(b"}}")[0] + b"}}"
    padded = header + b" " * (0x280 - len(header))
    weights = (0x280).to_bytes(8, "little") + padded + whole[8 + len(header) :]
    assert weights.startswith(b"\x80\x02")
    assert packed_kind(weights) is None
    assert read_adapter(write_peft(tmp_path / "mine", weights)).rank == 2


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_link_out_of_an_adapter_is_not_followed(name: str, tmp_path: Path) -> None:
    directory = write_peft(tmp_path / "mine")
    outside = (directory / name).rename(tmp_path / "outside")
    (directory / name).symlink_to(outside)
    with pytest.raises(InvalidRequest, match=f"{name} is a link that leads out of its directory"):
        read_adapter(directory)
    (directory / "inside").write_bytes(outside.read_bytes())
    (directory / name).unlink()
    (directory / name).symlink_to("inside")
    assert read_adapter(directory).rank == 2


def test_a_directory_that_is_reached_by_a_link_is_taken(tmp_path: Path) -> None:
    write_peft(tmp_path / "mine")
    (tmp_path / "link").symlink_to("mine")
    assert read_adapter(tmp_path / "link").rank == 2


@pytest.mark.parametrize("pickled", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights_beside_nothing_else_are_refused(pickled: str, tmp_path: Path) -> None:
    directory = write_peft(tmp_path / "mine")
    (directory / "adapter_model.safetensors").unlink()
    (directory / pickled).write_bytes(pickle.dumps(Exploit()))
    with pytest.raises(InvalidRequest, match=r"has no adapter_model\.safetensors") as refused:
        read_adapter(directory)
    assert "pickle" in refused.value.hint
    assert "never loaded" in refused.value.hint


@pytest.mark.parametrize("kind_of_dataset", ["json", "jsonl", "csv", "parquet"])
@each_kind
def test_a_dataset_that_is_an_archive_is_refused(
    content: bytes, kind: str, kind_of_dataset: str, tmp_path: Path
) -> None:
    path = tmp_path / f"d.{kind_of_dataset}"
    path.write_bytes(content)
    config = {"_type": kind_of_dataset, "file_path": path}
    with pytest.raises(InvalidRequest, match=f"is {kind}: archives are never unpacked"):
        FileDataset(FileDatasetConfig.model_validate(config), cast(Parts, None)).load()
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_workbook_that_grows_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = openpyxl.Workbook()
    book.worksheets[0].append(["question"])
    for _ in range(100):
        book.worksheets[0].append(["0" * 10_000])
    book.save(tmp_path / "d.xlsx")
    monkeypatch.setattr(table_rows, "_MAX_UNPACKED_BYTES", 100_000)
    assert (tmp_path / "d.xlsx").stat().st_size < 100_000
    with pytest.raises(InvalidRequest, match="at most 100000 are read"):
        table_rows.read_excel(tmp_path / "d.xlsx")


@each_kind
def test_a_backup_that_is_an_archive_is_refused(content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "backup").write_bytes(content)
    with pytest.raises(InvalidRequest, match=f"is {kind}: archives are never unpacked"):
        restore_state(tmp_path / "backup", tmp_path / "state")
    assert not (tmp_path / "state").exists()


UNPACKERS = {
    "dill",
    "joblib",
    "pickle",
    "shelve",
    "tarfile",
    "torch.load",
    "shutil.unpack_archive",
    "zipfile",
    "numpy.load",
    "np.load",
    "pandas",
}
MAY = {
    "datasets/table_rows.py": {"zipfile"},  # the sizes of the parts of an .xlsx file
}


def test_no_module_unpacks_or_unpickles() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
        if used := {name for name in names if name in UNPACKERS}:
            found[path.relative_to(SOURCES).as_posix()] = used
    assert found == MAY
