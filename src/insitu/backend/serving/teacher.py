"""Asks a teacher's server for the log-probabilities of the tokens in the loss.

The server is vLLM, or another that scores prompts of token ids: `POST /v1/completions` with
`prompt_logprobs`. It must have the policy's vocabulary: it answers with the ids that it scored, and one that
is not ours fails the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import aiohttp
import numpy as np

from insitu.backend.plan.settings import Deadlines
from insitu.backend.plan.teachers import TeacherSettings, key_variable
from insitu.errors import CannotHonour, DeadlineExceeded, UpstreamError
from insitu.system.tasks import all_or_none
from insitu.training.packing import num_sent
from insitu.types import TrainingSequence
from insitu.wire.engine import Completion, EngineModels, ScoredPrompts
from insitu.wire.message import Malformed, Message, encode, read

Received = TypeVar("Received", bound=Message)
_AT_ONCE = 8
_RETRY_SECONDS = 1.0


async def taught(
    sequences: Sequence[TrainingSequence], teacher: TeacherSettings, deadlines: Deadlines
) -> list[TrainingSequence]:
    """Return the sequences with the teacher's log-probability of every token in the loss."""
    if not sequences:
        return []
    headers = {} if teacher.key is None else {"Authorization": f"Bearer {teacher.key}"}
    places = asyncio.Semaphore(_AT_ONCE)
    try:
        async with asyncio.timeout(deadlines.step), aiohttp.ClientSession(headers=headers) as http:
            client = _TeacherClient(http, teacher, deadlines.score)
            model = teacher.model or await client.only_model()

            async def one(sequence: TrainingSequence) -> TrainingSequence:
                async with places:
                    return await client.teach(model, sequence)

            return await all_or_none([one(sequence) for sequence in sequences])
    except TimeoutError:
        raise DeadlineExceeded(
            f"teacher {teacher.name} did not score {len(sequences)} sequences in {deadlines.step:g} s",
            hint="--step-seconds sets the deadline",
        ) from None


class _TeacherClient:
    def __init__(
        self, http: aiohttp.ClientSession, teacher: TeacherSettings, deadline_seconds: float
    ) -> None:
        self._http = http
        self._teacher = teacher
        self._deadline_seconds = deadline_seconds

    async def only_model(self) -> str:
        """Return the name of the server's model; reject a server with several."""
        content = await self._request("GET", "/v1/models", None)
        named = [entry.id for entry in self._parsed(EngineModels, "/v1/models", content).data]
        if len(named) != 1:
            teacher = self._teacher
            raise CannotHonour(
                f"teacher {teacher.name} at {teacher.url} serves {len(named)} models: {', '.join(named[:5])}",
                hint=f"name one: --teacher {teacher.name}={teacher.url}#MODEL",
            )
        return named[0]

    async def teach(self, model: str, sequence: TrainingSequence) -> TrainingSequence:
        if not sequence.num_trained:
            return replace(sequence, teacher_t=np.empty(0, np.float32))
        ids = sequence.token_ids[: num_sent(sequence)].tolist()
        body = Completion(model=model, prompt=[ids], max_tokens=1, temperature=1.0, prompt_logprobs=0)
        content = await self._request("POST", "/v1/completions", body)
        scores = await asyncio.to_thread(self._scores, content, ids)
        from_second = np.array(scores, np.float32)
        return replace(sequence, teacher_t=from_second[sequence.mask[1 : len(ids)]])

    def _scores(self, content: bytes, ids: list[int]) -> list[float]:
        answer = self._parsed(ScoredPrompts, "/v1/completions", content)
        if len(answer.choices) != 1:
            raise UpstreamError(
                f"teacher {self._teacher.name} answered one prompt with {len(answer.choices)} choices"
            )
        try:
            return answer.choices[0].scores_of(ids)
        except Malformed as error:
            raise UpstreamError(
                f"teacher {self._teacher.name} at {self._teacher.url} did not score our tokens: {error}",
                hint="a teacher needs the vocabulary of the model in training",
            ) from error

    def _parsed(self, kind: type[Received], path: str, content: bytes) -> Received:
        try:
            return read(kind, content)
        except Malformed as error:
            teacher = self._teacher
            raise UpstreamError(
                f"teacher {teacher.name} at {teacher.url} answered {path} with {content[:200]!r}: {error}",
                hint="a teacher is a vLLM server, or one that scores prompts alike (prompt_logprobs)",
            ) from error

    async def _request(self, method: str, path: str, body: Completion | None) -> bytes:
        """Ask once, and once more if the connection fails."""
        try:
            return await self._once(method, path, body)
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(_RETRY_SECONDS)
        try:
            return await self._once(method, path, body)
        except aiohttp.ClientConnectionError as error:
            raise self._unreachable(path, error) from error

    async def _once(self, method: str, path: str, body: Completion | None) -> bytes:
        teacher = self._teacher
        data = None if body is None else encode(body, without=Completion.OPTIONAL)
        headers = None if data is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=self._deadline_seconds)
        try:
            async with self._http.request(
                method, teacher.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                content = await answer.read()
        except TimeoutError as error:
            message = f"teacher {teacher.name} at {teacher.url} did not answer {path} in "
            raise DeadlineExceeded(
                f"{message}{self._deadline_seconds:g} s", hint="--score-seconds sets the deadline"
            ) from error
        except aiohttp.ClientConnectionError:
            raise
        except aiohttp.ClientError as error:
            raise self._unreachable(path, error) from error
        if answer.status in (401, 403):
            raise UpstreamError(
                f"teacher {teacher.name} at {teacher.url} refused the key ({answer.status})",
                hint=f"set {key_variable(teacher.name)} where `insitu serve` is started",
            )
        if answer.status != 200:
            text = content[:500].decode("utf-8", "replace")
            raise UpstreamError(
                f"teacher {teacher.name} at {teacher.url} answered {answer.status} to {path}: {text}"
            )
        return content

    def _unreachable(self, path: str, error: aiohttp.ClientError) -> UpstreamError:
        teacher = self._teacher
        return UpstreamError(f"teacher {teacher.name} at {teacher.url} broke off during {path}: {error!r}")
