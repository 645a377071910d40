"""The gateway's own decoding against vLLM's: the same text from any tokens, however they are cut."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from insitu.gateway.protocols.base import SEED_TOKENS
from insitu.gateway.sampled_ids.pieces import load_pieces
from insitu.gateway.shared.counts import Counts
from insitu.gateway.texts.local_text import Spelling
from insitu.testing.models import tiny

pytestmark = pytest.mark.timeout(300)
NUM_ANSWERS = 400
ADDED = {
    "Ġxq¡": False,
    "<plain>": False,
    "<special>": True,
    "été": False,
    "two words": False,
    "\ufffd": False,
}
"""Tokens to add, and whether each is special."""


@pytest.fixture(params=["its own", "with added tokens"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer's directory; the second has tokens that a decoder may read in more than one way."""
    if request.param == "its own":
        return tiny()
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(tiny() / file, tmp_path)
    data = orjson.loads((tmp_path / "tokenizer.json").read_bytes())
    first = 1 + max(*data["model"]["vocab"].values(), *(added["id"] for added in data["added_tokens"]))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token, (content, special) in enumerate(ADDED.items(), first):
        data["added_tokens"].append({"id": token, "content": content, "special": special, **flags})
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(data))
    return tmp_path


def derendered(tokenizer: Any, prompt: list[int] | None, ids: list[int], *, for_parser: bool = False) -> str:
    """Decode an answer as the engine's derender does."""
    from vllm.renderers.online_derenderer import OnlineDerenderer, _decode_params, _seed_stream_state

    skip, spaces = _decode_params(tokenizer, None, preserve_special=for_parser)
    seed = _seed_stream_state(tokenizer, prompt, skip_special_tokens=skip)
    decode: Any = OnlineDerenderer._detokenize_delta
    options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    text, _ = decode(None, tokenizer, ids, seed, **options)
    return text


def kinds_of(tokenizer: Any, spelling: Spelling) -> list[list[int]]:
    """Return all tokens, those that are parts of characters, and those that are special, added or unknown."""
    size = len(tokenizer)
    halves = [token for token in range(size) if isinstance(spelling.of(token), bytes)]
    odd = [*range(size - len(ADDED), size), *tokenizer.all_special_ids, size, size + 1000]
    return [[*range(size)], halves, odd]


def some_ids(rng: random.Random, kinds: list[list[int]], most: int) -> list[int]:
    weights = rng.choice([(8, 1, 1), (1, 8, 1), (1, 1, 1)])
    return [rng.choice(kind) for kind in rng.choices(kinds, weights, k=rng.randint(1, most))]


def cut(rng: random.Random, ids: list[int]) -> list[list[int]]:
    """Cut an answer into chunks at random."""
    places = sorted(rng.sample(range(len(ids) + 1), rng.randint(0, min(5, len(ids)))))
    return [ids[a:b] for a, b in zip([0, *places], [*places, len(ids)], strict=True)]


@pytest.mark.parametrize("for_parser", [False, True], ids=["text", "for a parser"])
def test_the_gateway_decodes_as_vllm_does(folder: Path, for_parser: bool) -> None:
    from vllm.tokenizers import get_tokenizer

    tokenizer: Any = get_tokenizer(str(folder))
    spelling = load_pieces(folder).spelling
    assert spelling is not None
    rng, num_local, unseen = random.Random(19), 0, dict[int, bool]()
    kinds = kinds_of(tokenizer, spelling)
    for _ in range(NUM_ANSWERS):
        prompt, ids = some_ids(rng, kinds, 20), some_ids(rng, kinds, 40)
        text = spelling.start(prompt, Counts(), "call", spells_special=for_parser)
        if text is None:
            continue  # the prompt ends inside a character
        num_local += 1
        unseen |= {t: not derendered(tokenizer, None, [t]) for t in text.unsure(ids) if t not in unseen}
        said = "".join(text.feed(part, unseen) for part in cut(rng, ids))
        decoded = derendered(tokenizer, prompt[-SEED_TOKENS:], ids, for_parser=for_parser)
        assert said == decoded, (prompt, ids)
    assert num_local > NUM_ANSWERS / 4
    assert for_parser or True in unseen.values()
    print(f"gate vllm-text: {num_local} answers decoded as vLLM does ok")


def stream_of(tokenizer: Any, ids: list[int], *, detokenize: bool, interval: int | None) -> list[Any]:
    """Pass an answer, token by token, through vLLM's output processor; return the parts of the stream."""
    import numpy as np
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists

    params = SamplingParams(
        logprobs=0,
        detokenize=detokenize,
        stream_interval=interval,
        output_kind=RequestOutputKind.DELTA,
        max_tokens=100,
    )
    processor = OutputProcessor(tokenizer, log_stats=False)
    request = EngineCoreRequest(
        "r", [1, 2, 3], None, params, None, 0.0, None, None, None, external_req_id="r"
    )
    processor.add_request(request, None)
    parts: list[Any] = []
    for number, token in enumerate(ids):
        logprobs = LogprobsLists(
            np.array([[token]]), np.array([[-0.25 * number]], dtype=np.float32), np.array([1])
        )
        reason = FinishReason.LENGTH if number == len(ids) - 1 else None
        output = EngineCoreOutput("r", [token], new_logprobs=logprobs, finish_reason=reason)
        made = processor.process_outputs([output], weight_version="base").request_outputs
        parts += [one.outputs[0] for one in made]
    return parts


def test_steps_and_no_text_change_nothing_of_what_is_recorded() -> None:
    """The gateway reads ids, logprobs, the finish reason and the weights of the chunks, and nothing else."""
    from vllm.tokenizers import get_tokenizer

    tokenizer: Any = get_tokenizer(str(tiny()))
    ids = [random.Random(3).randrange(len(tokenizer)) for _ in range(23)]

    def recorded(parts: list[Any]) -> tuple[Any, ...]:
        logprobs = [
            step[token].logprob
            for part in parts
            for token, step in zip(part.token_ids, part.logprobs, strict=True)
        ]
        last = parts[-1]
        spans = [(span.version, span.start, span.end) for span in last.weight_versions]
        return [t for part in parts for t in part.token_ids], logprobs, last.finish_reason, spans

    whole = stream_of(tokenizer, ids, detokenize=True, interval=None)
    steps = stream_of(tokenizer, ids, detokenize=False, interval=8)
    assert [len(part.token_ids) for part in whole] == [1] * 23
    assert [len(part.token_ids) for part in steps] == [1, 8, 8, 6]
    assert recorded(steps) == recorded(whole)
    assert recorded(whole)[0] == ids
    assert "".join(part.text for part in steps) == ""
    assert "".join(part.text for part in whole)
