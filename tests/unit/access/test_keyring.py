"""Keys are recognised by their hashes, and changes reach a running process within seconds."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from insitu.access import key_changes, keyring
from insitu.access.key_changes import create_key, revoke_key
from insitu.access.key_file import KEYS_FILE, MAX_KEYS, StoredKey, read_keys, write_keys
from insitu.access.keyring import MAX_AGE_SECONDS, Keyring
from insitu.access.scopes import Scope
from insitu.errors import Conflict, DeadlineExceeded, InvalidRequest, NotFound, Unauthorized, Unavailable
from insitu.system.keys import hash_key
from tests.support.disk import Disk

OWN = "own-key"
DAY = 86_400.0


class Ring(Keyring):
    """A ring whose clock the test moves."""

    def __init__(self, state_dir: Path) -> None:
        self.now = 0.0
        super().__init__(hash_key(OWN), state_dir / KEYS_FILE, clock=lambda: self.now)

    def scopes(self, key: str) -> set[str] | None:
        """The key's scopes; None if it is unknown."""
        holder = self.holder([key])
        return None if holder is None else set(holder.scopes)

    def later(self, key: str) -> set[str] | None:
        self.now += 1.0
        return self.scopes(key)


def test_a_key_is_random_and_stored_as_its_hash(tmp_path: Path) -> None:
    first, stored = create_key(tmp_path, "a", [Scope.INFER])
    second, _ = create_key(tmp_path, "b", [Scope.INFER])
    assert first != second
    assert first.startswith("insitu_")
    assert len(first) == len("insitu_") + 43  # 256 bits in base64
    assert stored.sha256 == hash_key(first).hex()
    content = (tmp_path / KEYS_FILE).read_text()
    assert stored.sha256 in content
    assert first not in content
    assert first.removeprefix("insitu_") not in content


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_the_owner_reads_the_file(tmp_path: Path, mask: int) -> None:
    (tmp_path / f".{KEYS_FILE}.tmp").write_text("left by a crash, with other permissions")
    old = os.umask(mask)
    try:
        create_key(tmp_path / "state", "a", [Scope.INFER])
        revoke_key(tmp_path / "state", "a")
        create_key(tmp_path, "a", [Scope.INFER])
    finally:
        os.umask(old)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    for directory in (tmp_path, tmp_path / "state"):
        assert (directory / KEYS_FILE).stat().st_mode & 0o777 == 0o600


def test_changes_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    disk = Disk(monkeypatch)
    for change in (
        lambda: create_key(state, "a", [Scope.INFER]),
        lambda: create_key(state, "b", [Scope.INFER]),
        lambda: revoke_key(state, "a"),
    ):
        change()
        lost = [each for each in disk.lost(tmp_path) if "keys.lock" not in each and "audit.jsonl" not in each]
        assert lost == [], "the audit log alone may lose its last lines"


def test_the_key_of_the_environment_has_every_scope(tmp_path: Path) -> None:
    for path in (None, tmp_path / KEYS_FILE):
        holder = Keyring(hash_key(OWN), path).holder([OWN])
        assert holder is not None
        assert all(holder.may(scope) for scope in Scope)
        assert Keyring(hash_key(OWN), path).holder(["other", ""]) is None
        assert Keyring(hash_key(OWN), path).holder([]) is None


def test_each_scope_stands_by_itself_and_admin_has_all(tmp_path: Path) -> None:
    for scope in Scope:
        secret, _ = create_key(tmp_path, scope, [scope])
        holder = Ring(tmp_path).holder([secret])
        assert holder is not None
        assert {each for each in Scope if holder.may(each)} == ({*Scope} if scope == "admin" else {scope})


def test_a_running_process_sees_new_and_revoked_keys(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    assert ring.scopes("insitu_guess") is None  # no file yet
    first, _ = create_key(tmp_path, "first", [Scope.INFER])
    assert ring.later(first) == {"infer"}
    second, _ = create_key(tmp_path, "second", [Scope.SUBMIT, Scope.INFER])
    assert ring.later(second) == {"infer", "submit"}
    revoke_key(tmp_path, "first")
    with pytest.raises(Unauthorized, match="revoked"):
        ring.later(first)
    assert ring.scopes(second) == {"infer", "submit"}
    (tmp_path / KEYS_FILE).unlink()
    assert ring.later(second) is None
    assert ring.later(OWN) == {"admin"}


def test_a_change_counts_from_the_next_request_on(tmp_path: Path) -> None:
    ring = Ring(tmp_path)  # its clock stands still
    for n in range(20):
        secret, _ = create_key(tmp_path, f"k{n}", [Scope.INFER])
        assert ring.scopes(secret) == {"infer"}
        revoke_key(tmp_path, f"k{n}")
        with pytest.raises(Unauthorized):
            ring.scopes(secret)


def test_a_change_that_the_file_system_hides_is_seen_within_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "_signature", lambda _path: (1, 2, 3, 4))
    ring = Ring(tmp_path)
    assert ring.scopes("x") is None
    secret, _ = create_key(tmp_path, "a", [Scope.INFER])
    assert MAX_AGE_SECONDS <= 5.0
    ring.now = 5.0
    assert ring.scopes(secret) == {"infer"}


def test_an_unchanged_file_is_seldom_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, _ = create_key(tmp_path, "a", [Scope.INFER])
    ring = Ring(tmp_path)
    reads: list[Path] = []
    monkeypatch.setattr(keyring, "read_keys", lambda path: reads.append(path) or read_keys(path))
    for _ in range(100):
        ring.now += 0.2
        assert ring.scopes(secret) == {"infer"}
    assert len(reads) == 4
    (tmp_path / KEYS_FILE).write_text("damaged")
    for _ in range(100):
        ring.now += 0.02
        with pytest.raises(Unavailable):
            ring.scopes(secret)
    assert len(reads) in (6, 7)


def test_an_older_file_of_the_same_size_counts_as_a_change(tmp_path: Path) -> None:
    secret, stored = create_key(tmp_path, "a", [Scope.INFER])
    ring = Ring(tmp_path)
    assert ring.scopes(secret) == {"infer"}
    path = tmp_path / KEYS_FILE
    size = path.stat().st_size
    write_keys(path, [StoredKey("b", "0" * 64, stored.scopes, stored.created_at)])
    assert path.stat().st_size == size
    os.utime(path, (1, 1))  # as `cp -p` from a backup leaves it
    assert ring.later(secret) is None


def test_a_key_expires_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, stored = create_key(tmp_path, "a", [Scope.SUBMIT], 30 * DAY)
    ring = Ring(tmp_path)
    assert stored.expires_at == pytest.approx(time.time() + 30 * DAY, abs=60)
    assert ring.scopes(secret) == {"submit"}
    monkeypatch.setattr(time, "time", lambda: stored.expires_at)
    with pytest.raises(Unauthorized, match="expired") as raised:
        ring.scopes(secret)
    assert "insitu keys create NAME --scope submit" in raised.value.hint
    assert "'a'" not in str(raised.value)
    assert create_key(tmp_path, "a", [Scope.INFER])[0] != secret  # the name is free again


def test_an_ended_key_is_forgotten_after_a_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_key(tmp_path, "revoked", [Scope.INFER])
    create_key(tmp_path, "expired", [Scope.INFER], DAY)
    create_key(tmp_path, "valid", [Scope.INFER])
    revoke_key(tmp_path, "revoked")
    started = time.time()

    def names() -> list[str]:
        return [key.name for key in read_keys(tmp_path / KEYS_FILE)]

    monkeypatch.setattr(time, "time", lambda: started + 29 * DAY)
    create_key(tmp_path, "new", [Scope.INFER])
    assert names() == ["revoked", "expired", "valid", "new"]
    monkeypatch.setattr(time, "time", lambda: started + 32 * DAY)
    create_key(tmp_path, "newer", [Scope.INFER])
    assert names() == ["valid", "new", "newer"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"version": 2, "keys": []}',
        b'{"version": 1, "keys": [{"name": "a", "sha256": "00", "scopes": ["admin"], "created_at": 1.0}]}',
        b'{"version": 1, "keys": [{"name": "a", "sha256": "' + b"0" * 64 + b'", "scopes": ["root"], '
        b'"created_at": 1.0}]}',
        b" " * (2 << 20),
    ],
)
def test_a_damaged_file_opens_nothing(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    secret, _ = create_key(tmp_path, "a", [Scope.INFER])
    ring = Ring(tmp_path)
    assert ring.scopes(secret) == {"infer"}
    path = tmp_path / KEYS_FILE
    whole = path.read_bytes()
    path.write_bytes(content)
    for _ in range(3):
        with pytest.raises(Unavailable) as raised:
            ring.later(secret)
        assert str(tmp_path) not in str(raised.value)
    assert [str(path) in line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == [True]
    assert ring.scopes(OWN) == {"admin"}
    with pytest.raises(Unavailable, match=KEYS_FILE):
        create_key(tmp_path, "b", [Scope.INFER])
    path.write_bytes(whole)
    assert ring.later(secret) == {"infer"}


def test_a_file_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, _ = create_key(tmp_path, "a", [Scope.INFER])
    ring = Ring(tmp_path)

    def no_descriptor_left(_path: Path) -> list[StoredKey]:
        raise Unavailable("too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(keyring, "read_keys", no_descriptor_left)
        with pytest.raises(Unavailable):
            ring.scopes(secret)
    assert ring.later(secret) == {"infer"}


def test_every_key_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = [create_key(tmp_path, f"k{n}", [Scope.INFER])[0] for n in range(5)]
    ring = Ring(tmp_path)
    assert ring.scopes(secrets[0]) == {"infer"}
    compared: list[tuple[bytes, bytes]] = []
    real = keyring.hmac.compare_digest
    monkeypatch.setattr(keyring.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    counts: set[int] = set()
    for key in (*secrets, OWN, "unknown"):
        compared.clear()
        ring.scopes(key)
        counts.add(len(compared))
    assert counts == {6}


def test_names_are_checked_and_belong_to_one_valid_key(tmp_path: Path) -> None:
    for name in ("", "A", "../a", "a b", "-x", "x" * 65):
        with pytest.raises(InvalidRequest):
            create_key(tmp_path, name, [Scope.INFER])
    secret, _ = create_key(tmp_path, "a", [Scope.INFER])
    with pytest.raises(Conflict, match="'a'") as raised:
        create_key(tmp_path, "a", [Scope.ADMIN])
    assert "insitu keys revoke a" in raised.value.hint
    first = revoke_key(tmp_path, "a")
    assert revoke_key(tmp_path, "a") == first
    again, _ = create_key(tmp_path, "a", [Scope.ADMIN])
    ring = Ring(tmp_path)
    assert ring.scopes(again) == {"admin"}
    with pytest.raises(Unauthorized, match="revoked"):
        ring.scopes(secret)
    assert revoke_key(tmp_path, "a").scopes == [Scope.ADMIN]
    with pytest.raises(NotFound, match="it has: a"):
        revoke_key(tmp_path, "b")
    with pytest.raises(NotFound):
        revoke_key(tmp_path / "nowhere", "a")


def test_the_number_of_keys_has_a_bound(tmp_path: Path) -> None:
    key = StoredKey("a", "0" * 64, [Scope.INFER], 1.0, None, None)
    write_keys(tmp_path / KEYS_FILE, [key] * MAX_KEYS)
    assert len(read_keys(tmp_path / KEYS_FILE)) == MAX_KEYS
    with pytest.raises(Conflict, match="1000"):
        create_key(tmp_path, "b", [Scope.INFER])


def _create(state_dir: Path, prefix: str) -> None:
    for n in range(10):
        create_key(state_dir, f"{prefix}{n}", [Scope.INFER])


def test_processes_that_create_at_once_lose_no_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_create, args=(tmp_path, prefix)) for prefix in "abc"]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len({key.name for key in read_keys(tmp_path / KEYS_FILE)}) == 30


def test_the_wait_for_another_command_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_changes, "_LOCK_SECONDS", 0.2)
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with key_changes._changing(tmp_path):  # pyright: ignore[reportPrivateUsage]
            inside.set()
            done.wait(30)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        assert inside.wait(10)
        with pytest.raises(DeadlineExceeded):
            create_key(tmp_path, "a", [Scope.INFER])
    finally:
        done.set()
        holding.join(10)
    create_key(tmp_path, "a", [Scope.INFER])


def test_a_directory_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InvalidRequest) as raised:
        create_key(tmp_path, "a", [Scope.INFER])
    assert f"sudo -u '#{owner}'" in raised.value.hint
    assert not (tmp_path / KEYS_FILE).exists()


def test_a_state_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="file"):
        create_key(tmp_path / "file" / "state", "a", [Scope.INFER])
