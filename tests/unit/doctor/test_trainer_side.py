"""The trainer's checks: a wrong kernel, a crash and a device that torch cannot use are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from insitu.doctor import trainer_side  # noqa: E402
from insitu.training.attention_check import AttentionShape  # noqa: E402
from insitu.training.model import attention  # noqa: E402

SHAPE = AttentionShape(2, 1, 16)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSITU_CACHE", str(tmp_path))
    return tmp_path


def verdict(cache: Path) -> dict[str, object]:
    (path,) = (cache / "devices").iterdir()
    assert path.name.endswith("_head-16.json")
    return json.loads(path.read_text())


def test_right_attention_passes_and_is_kept(cache: Path) -> None:
    finding = trainer_side._tree_rows(SHAPE, CPU, torch.float32)
    assert finding.state == "ok"
    assert [figure.name for figure in finding.figures] == ["values", "gradients"]
    assert verdict(cache)["holds"] is True


def test_wrong_attention_fails_and_the_trainer_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = attention._flash_forward

    def altered(*args: object, **kwargs: object) -> tuple[object, object]:
        output, logsumexp = forward(*args, **kwargs)
        return output * 1.001, logsumexp

    monkeypatch.setattr(attention, "_flash_forward", altered)
    finding = trainer_side._tree_rows(SHAPE, CPU, torch.float32)
    assert finding.state == "failed"
    assert finding.hint
    assert verdict(cache)["holds"] is False
    assert "values 0.001 (bound 0.0001)" in str(verdict(cache)["detail"])


def test_a_kernel_that_does_not_compile_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(trainer_side, "tree_row_error", broken)
    finding = trainer_side._tree_rows(SHAPE, CPU, torch.float32)
    assert finding.state == "failed"
    assert "out of resource: shared memory" in finding.detail
    assert verdict(cache)["holds"] is False


def test_a_check_that_ends_its_process_has_failed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt  # nothing after this line runs, as after a signal

    monkeypatch.setattr(trainer_side, "tree_row_error", killed)
    with pytest.raises(KeyboardInterrupt):
        trainer_side._tree_rows(SHAPE, CPU, torch.float32)
    assert verdict(cache)["holds"] is False
    assert "did not finish" in str(verdict(cache)["detail"])


def test_an_nvidia_device_that_torch_cannot_use_fails() -> None:
    finding = trainer_side._device("cpu", has_nvidia=True)
    assert finding.state == "failed"
    assert "insitu[backend]" in finding.hint
    assert trainer_side._device("cpu", has_nvidia=False).state == "ok"


def test_siblings_share_the_first_half_and_differ_in_reward() -> None:
    fixed = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    rows = trainer_side._siblings(fixed)
    assert rows == [*fixed, [1, 2, 8, 9, 10], [5, 6, 7, 3, 4]]
    sequences = trainer_side._sequences(rows, [[-1.0] * (len(row) - 1) for row in rows])
    assert [sequence.mask.tolist() for sequence in sequences[:2]] == [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert [max(sequence.advantages.tolist(), key=abs) for sequence in sequences] == [1.0, 1.0, -1.0, -1.0]
    assert sequences[0].logprobs.tolist() == [0.0, 0.0, -1.0, -1.0]
