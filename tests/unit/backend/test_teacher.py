"""A teacher that is served elsewhere: who it is, what it is asked, and what it must answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from insitu.backend.jobs import Clock, StepRunner
from insitu.backend.plan.compute import Compute
from insitu.backend.plan.settings import Deadlines, ServeSettings
from insitu.backend.plan.teachers import TeacherSettings, read_teachers
from insitu.backend.serving import teacher as asking
from insitu.backend.serving.teacher import taught
from insitu.errors import CannotHonour, DeadlineExceeded, UpstreamError
from insitu.training.selection import Batch
from insitu.training.sequences import sequence_of
from insitu.types import StepSettings, TrainingSequence

KEY = "secret-of-the-teacher"
DEADLINES = Deadlines()


class StandinTeacher:
    """Scores token n with -n / 10, or as it was told to."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, Any]] = []
        self.models = ["big"]
        self.status = 200
        self.breaks = 0
        self.hangs = False
        self.shift = 0
        self.under_way = self.most = 0

    async def models_route(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((request.path, request.headers.get("Authorization"), body))
        if self.hangs:
            await asyncio.Event().wait()
        if self.breaks:
            self.breaks -= 1
            assert request.transport is not None
            request.transport.close()
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.01)
        self.under_way -= 1
        rows = [{str(token + self.shift): {"logprob": -token / 10}} for token in body["prompt"][0][1:]]
        return web.json_response(
            {"choices": [{"index": 0, "prompt_logprobs": [None, *rows]}]}, status=self.status
        )


@pytest.fixture
async def standin() -> StandinTeacher:
    return StandinTeacher()


@pytest.fixture
async def settings(standin: StandinTeacher) -> AsyncIterator[TeacherSettings]:
    app = web.Application()
    app.router.add_get("/v1/models", standin.models_route)
    app.router.add_post("/v1/completions", standin.complete)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    (read,) = read_teachers([f"big-one=http://{host}:{port}/v1"], {"INSITU_TEACHER_KEY_BIG_ONE": KEY})
    yield read
    await runner.cleanup()


def sequence(ids: list[int], mask: list[int]) -> TrainingSequence:
    zeros = [0.0] * len(ids)
    return sequence_of("r", ids, mask, zeros, [float(m) for m in mask], [0] * len(ids))


async def test_it_scores_the_tokens_in_the_loss_and_is_sent_no_more(
    standin: StandinTeacher, settings: TeacherSettings
) -> None:
    made = [sequence([9, 1, 2, 8, 3, 7], [0, 1, 1, 0, 1, 0]), sequence([5, 6], [0, 0])]
    first, nothing = await taught(made, settings, DEADLINES)
    assert first.teacher_t is not None
    assert nothing.teacher_t is not None
    assert first.teacher_t.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert len(nothing.teacher_t) == 0
    ((path, authorization, body),) = standin.requests
    assert (path, authorization) == ("/v1/completions", f"Bearer {KEY}")
    assert body == {
        "model": "big",
        "prompt": [[9, 1, 2, 8, 3]],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
    }
    assert await taught([], settings, DEADLINES) == []
    assert KEY not in repr(settings)


async def test_many_sequences_are_asked_for_a_few_at_a_time(
    standin: StandinTeacher, settings: TeacherSettings
) -> None:
    made = [sequence([1, token], [0, 1]) for token in range(2, 42)]
    answered = await taught(made, replace(settings, model="named"), DEADLINES)
    scores = [one.teacher_t.tolist()[0] for one in answered if one.teacher_t is not None]
    assert scores == pytest.approx([-token / 10 for token in range(2, 42)])
    assert {body["model"] for _, _, body in standin.requests} == {"named"}
    assert 2 <= standin.most <= 8


async def test_another_vocabulary_is_noticed(standin: StandinTeacher, settings: TeacherSettings) -> None:
    standin.shift = 1
    with pytest.raises(UpstreamError, match="token 7 at place 1 is not scored, but 8") as raised:
        await taught([sequence([1, 7], [0, 1])], settings, DEADLINES)
    assert "vocabulary" in raised.value.hint
    assert KEY not in str(raised.value)


async def test_a_connection_that_breaks_is_tried_once_more(
    standin: StandinTeacher, settings: TeacherSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_RETRY_SECONDS", 0.01)
    standin.breaks = 1
    await taught([sequence([1, 7], [0, 1])], settings, DEADLINES)
    assert len(standin.requests) == 2
    standin.breaks = 2
    with pytest.raises(UpstreamError, match=r"teacher big-one at .* broke off during /v1/completions"):
        await taught([sequence([1, 7], [0, 1])], settings, DEADLINES)


async def test_a_teacher_that_hangs_is_given_up(standin: StandinTeacher, settings: TeacherSettings) -> None:
    standin.hangs = True
    made = [sequence([1, 7], [0, 1])]
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded, match=r"did not answer /v1/completions in 0.05 s") as raised:
            await taught(made, settings, replace(DEADLINES, score=0.05))
        assert "--score-seconds" in raised.value.hint
        with pytest.raises(DeadlineExceeded, match=r"did not score 1 sequences in 0.05 s"):
            await taught(made, settings, replace(DEADLINES, step=0.05))


async def test_refusals_say_what_to_do(standin: StandinTeacher, settings: TeacherSettings) -> None:
    made = [sequence([1, 7], [0, 1])]
    standin.status = 401
    with pytest.raises(UpstreamError, match="refused the key") as raised:
        await taught(made, settings, DEADLINES)
    assert "INSITU_TEACHER_KEY_BIG_ONE" in raised.value.hint
    standin.status = 302
    with pytest.raises(UpstreamError, match="answered 302"):
        await taught(made, settings, DEADLINES)
    standin.models = ["one", "two"]
    with pytest.raises(CannotHonour, match="serves 2 models: one, two") as several:
        await taught(made, settings, DEADLINES)
    assert "#MODEL" in several.value.hint


async def test_a_job_asks_the_teacher_that_its_settings_name(
    standin: StandinTeacher, settings: TeacherSettings
) -> None:
    served = ServeSettings(
        state_dir=Path("state"),
        device="cpu",
        compute=cast(Compute, None),
        publication="adapter",
        placement="shared",
        api_key="default",
        teachers=(settings,),
    )
    said: list[str] = []

    def progress(_job: str, phase: str, *_: object) -> None:
        said.append(phase)

    runner = StepRunner(
        served, cast(Any, SimpleNamespace(set_progress=progress)), cast(Any, None), cast(Any, None)
    )
    batch = Batch([sequence([1, 7], [0, 1])], {})

    async def after(step: StepSettings) -> Batch:
        job, host = SimpleNamespace(id="job", settings=step), SimpleNamespace(settings=served)
        return await runner._taught(cast(Any, job), batch, cast(Any, host), Clock())

    (scored,) = (await after(StepSettings(method="distill", teacher="big-one"))).sequences
    assert scored.teacher_t is not None
    assert (scored.teacher_t.tolist(), said) == ([pytest.approx(-0.7)], ["teacher"])
    assert await after(StepSettings(method="distill", teacher="run@3")) is batch
    assert await after(StepSettings()) is batch
    with pytest.raises(CannotHonour, match=r"no teacher 'gone' here; .* named big-one"):
        await after(StepSettings(method="distill", teacher="gone"))
    assert len(standin.requests) == 1


def test_teachers_are_read_with_their_keys() -> None:
    given = ["a=http://h:1/v1/", "b.c=https://h/deep/v1#org/model"]
    a, b = read_teachers(given, {"INSITU_TEACHER_KEY_B_C": "k"})
    assert a == TeacherSettings("a", "http://h:1", None, None)
    assert b == TeacherSettings("b.c", "https://h/deep", "org/model", "k")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["http://h:1"], "is not a name"),
        (["run@3=http://h:1"], "is not a name"),
        (["a=ftp://h"], "not a URL of a server"),
        (["a=h:8000"], "not a URL of a server"),
        (["a=http://user:secret@h"], "holds a password"),
        (["a=http://h", "a=http://other"], "given twice"),
    ],
)
def test_other_teachers_are_refused(given: list[str], why: str) -> None:
    with pytest.raises(CannotHonour, match=why) as raised:
        read_teachers(given, {})
    assert "secret" not in str(raised.value)
