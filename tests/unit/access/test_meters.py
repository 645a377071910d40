"""What a key uses is counted, and what is beyond its limits is rejected, by clocks that the tests move."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.access import day_use, meters
from insitu.access.day_use import DayUse
from insitu.access.key_limits import KeyLimits
from insitu.access.keyring import Holder
from insitu.access.meters import KeyMeters
from insitu.access.scopes import Scope
from insitu.errors import LimitReached, TooLarge

NOON = 20_000 * 86_400.0 + 43_200.0
HALF_A_DAY = 43_200


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return NOON + self.now


def metered(clock: Clock, path: Path | None = None) -> KeyMeters:
    return KeyMeters(path, clock=clock, wall_clock=clock.wall)


def holder(limits: KeyLimits | None, name: str = "agent") -> Holder:
    return Holder(name, frozenset({Scope.INFER}), limits=limits)


def use(meters: KeyMeters, who: Holder, num_bytes: int | None = 0, num_tokens: int = 0) -> None:
    with meters.admitted(who, num_bytes) as admission:
        admission.check_tokens()
        admission.spend_tokens(num_tokens)


@contextmanager
def reached(retry_seconds: int, *words: str) -> Generator[None]:
    with pytest.raises(LimitReached) as raised:
        yield
    assert raised.value.retry_seconds == retry_seconds
    assert raised.value.status == 429
    for word in ("agent", *words):
        assert word in str(raised.value)


@given(
    most=st.integers(1, 5),
    pauses=st.lists(st.integers(0, 360).map(lambda quarters: quarters / 4), max_size=40),
)
def test_no_sixty_seconds_hold_more_requests_than_the_limit(most: int, pauses: list[float]) -> None:
    clock, let_in = Clock(), list[float]()
    counted, who = metered(clock), holder(KeyLimits(requests_per_minute=most))
    for pause in pauses:
        clock.now += pause
        recent = [at for at in let_in if clock.now - at < 60]
        try:
            use(counted, who)
        except LimitReached as error:
            assert len(recent) == most
            clock.now += error.retry_seconds
            use(counted, who)  # the hint was right
        else:
            assert len(recent) < most
        let_in.append(clock.now)


def test_requests_under_way_are_bounded_however_they_end() -> None:
    counted, who = metered(Clock()), holder(KeyLimits(concurrent=2))
    with ExitStack() as both:
        both.enter_context(counted.admitted(who, 0))
        both.enter_context(counted.admitted(who, 0))
        for _ in range(3):
            with reached(5, "2 requests under way", "limit is 2"):
                use(counted, who)
        use(counted, holder(KeyLimits(concurrent=2), "other"))
    for failure in (ValueError, asyncio.CancelledError, GeneratorExit):
        for _ in range(3):
            with pytest.raises(failure), counted.admitted(who, 0):
                raise failure
    assert counted.under_way("agent") == 0
    with counted.admitted(who, 0):
        assert counted.under_way("agent") == 1


def test_tokens_are_used_up_until_midnight() -> None:
    clock = Clock()
    counted, who = metered(clock), holder(KeyLimits(tokens_per_day=100))
    use(counted, who, num_tokens=99)
    use(counted, who, num_tokens=50)  # begun within the budget, so it is finished
    clock.now = 3600.0
    with reached(HALF_A_DAY - 3600, "149 tokens", "limit is 100", "midnight UTC", "--max-tokens-per-day"):
        use(counted, who)
    with counted.admitted(who, 0):  # what samples no token is let in
        pass
    clock.now = HALF_A_DAY - 0.5
    with reached(1):
        use(counted, who)
    clock.now = HALF_A_DAY
    use(counted, who, num_tokens=1)
    assert counted.today()["agent"].tokens == 1


def test_bytes_are_used_up_until_midnight() -> None:
    clock = Clock()
    counted, who = metered(clock), holder(KeyLimits(bytes_per_day=1000))
    use(counted, who, num_bytes=600)
    with reached(HALF_A_DAY, "600 bytes", "limit is 1000"):
        use(counted, who, num_bytes=401)
    use(counted, who, num_bytes=400)
    with reached(HALF_A_DAY, "1000 bytes"):
        use(counted, who, num_bytes=None)
    use(counted, who, num_bytes=0)  # without a body
    with pytest.raises(TooLarge, match="1001 bytes"):  # waiting would not help
        use(counted, who, num_bytes=1001)
    clock.now = HALF_A_DAY
    with counted.admitted(who, None) as admission:
        admission.spend_bytes(5000)
    with reached(86_400, "5000 bytes"):
        use(counted, who, num_bytes=1)


def test_a_key_without_limits_is_counted_and_the_own_key_is_not() -> None:
    counted = metered(Clock())
    for _ in range(3):
        use(counted, holder(KeyLimits()), 7, num_tokens=5)
        use(counted, holder(None, "INSITU_API_KEY"), 7, num_tokens=5)
    with counted.admitted(None, 0) as admission:
        admission.check_tokens()
    assert counted.today() == {"agent": DayUse(requests=3, tokens=15, bytes=21)}


def test_a_rejected_request_counts_as_such_and_as_nothing_else() -> None:
    clock = Clock()
    counted, who = metered(clock), holder(KeyLimits(requests_per_minute=1))
    use(counted, who)
    for _ in range(4):
        clock.now += 10
        with pytest.raises(LimitReached):
            use(counted, who, 100)
    assert counted.today() == {"agent": DayUse(requests=1, rejected=4)}
    clock.now = 60.0
    use(counted, who)


async def test_what_was_used_today_survives_a_restart(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "usage.json"
    who = holder(KeyLimits(tokens_per_day=10, bytes_per_day=100))
    before = metered(clock, path)
    use(before, who, 60, num_tokens=10)
    await before.save()
    assert path.stat().st_mode & 0o777 == 0o600
    after = metered(clock, path)
    assert after.today() == before.today()
    with reached(HALF_A_DAY, "10 tokens"):
        use(after, who)
    with reached(HALF_A_DAY, "60 bytes"):
        use(after, who, 41)
    clock.now = HALF_A_DAY
    use(metered(clock, path), who, 41)  # another day


async def test_only_changes_are_written(tmp_path: Path) -> None:
    counted = metered(Clock(), tmp_path / "usage.json")
    await counted.save()
    assert not (tmp_path / "usage.json").exists()
    use(counted, holder(KeyLimits()))
    await counted.save()
    (tmp_path / "usage.json").unlink()
    await counted.save()
    assert not (tmp_path / "usage.json").exists()


async def test_saving_goes_on_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "SAVE_SECONDS", 0.0)
    counted, path = metered(Clock(), tmp_path / "usage.json"), tmp_path / "usage.json"
    saving = asyncio.create_task(counted.keep_saved())
    async with asyncio.timeout(10):
        for tokens in (1, 2):
            use(counted, holder(KeyLimits()), num_tokens=1)
            while metered(Clock(), path).today() != {"agent": DayUse(tokens, tokens=tokens)}:
                await asyncio.sleep(0)
    saving.cancel()


async def test_a_full_disk_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    counted = metered(Clock(), tmp_path / "usage.json")
    use(counted, holder(KeyLimits()))
    with monkeypatch.context() as patch:
        patch.setattr(day_use, "write_atomic", full)
        for _ in range(3):
            await counted.save()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    await counted.save()
    assert metered(Clock(), tmp_path / "usage.json").today() == counted.today()


@pytest.mark.parametrize("content", [b"", b"{", b'{"version":1,"day":"x","keys":{}}', b"[]"])
def test_a_damaged_file_counts_from_zero_and_says_so(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "usage.json").write_bytes(content)
    assert metered(Clock(), tmp_path / "usage.json").today() == {}
    assert "counts from zero" in caplog.text


def test_keys_that_are_not_used_are_forgotten_at_midnight() -> None:
    clock = Clock()
    counted = metered(clock)
    for n in range(100):
        use(counted, holder(KeyLimits(requests_per_minute=5), f"k{n}"))
    with counted.admitted(holder(KeyLimits(concurrent=1)), 0):
        clock.now = HALF_A_DAY
        assert counted.today() == {}
        assert len(counted._meters) == 1
        with reached(5):
            use(counted, holder(KeyLimits(concurrent=1)))
