"""Token bytes against the tokenizers library: what a table says is what encoding and decoding do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from insitu.gateway.sampled_ids.pieces import NoPieces, Pieces, find_tokenizer, load_pieces

pytestmark = pytest.mark.timeout(60)
_TEXT = "What is 3 + 5? Reply with the number only.\nüber naïve 東京 🦊 10 100 1000 <call> done " * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [_TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return with_added(tokenizer)


def sentence_piece() -> Tokenizer:
    """As Llama 2 and Gemma have it: `▁` for spaces, bytes for what the vocabulary lacks."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"0135Whatisn?ly.", "▁1", "10", "is"]
    vocabulary = {name: i for i, name in enumerate(names)}
    model = models.BPE(
        vocabulary, [("▁", "1"), ("1", "0"), ("i", "s")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    return with_added(tokenizer)


def unigram() -> Tokenizer:
    scores = [("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "0135Whatisn?ly."), ("10", -2.5)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken("  ", normalized=False)])
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path, **config: Any) -> Pieces:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_pieces(folder)


def id_of(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer.token_to_id(name)
    assert token is not None
    return token


def joined(pieces: Pieces, ids: list[int]) -> bytes:
    return b"".join(pieces[token] or f"[{token}]".encode() for token in ids)


MAKERS = {"byte-level": byte_level, "sentencepiece": sentence_piece}


@pytest.mark.parametrize("family", MAKERS)
def test_the_bytes_of_any_text_are_those_of_its_tokens(family: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[family]()
    pieces = saved(tokenizer, tmp_path)

    @settings(max_examples=300, deadline=None)
    @given(
        st.text(alphabet=st.sampled_from("0135 Whatisn?<call>é東🦊\n\ufffd") | st.characters(codec="utf-8"))
    )
    def check(text: str) -> None:
        assert joined(pieces, tokenizer.encode(text).ids) == text.replace("▁", " ").encode() or "▁" in text
        assert "<|end|>" not in text

    check()
    for token in range(tokenizer.get_vocab_size()):
        text = pieces[token]
        if text is not None:
            assert text.decode("utf-8", "replace") == tokenizer.decode([token], skip_special_tokens=False)


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    tokenizer = unigram()
    pieces = saved(tokenizer, tmp_path)
    assert joined(pieces, tokenizer.encode("What is 10?").ids) == b"What is 10?"
    assert pieces[0] is None  # the unknown token stands for any text
    assert pieces[tokenizer.encode("é").ids[-1]] is None


@pytest.mark.parametrize("family", MAKERS)
def test_special_tokens_have_no_bytes_and_added_ones_their_content(family: str, tmp_path: Path) -> None:
    tokenizer = MAKERS[family]()
    pieces = saved(tokenizer, tmp_path)
    special, added = id_of(tokenizer, "<|end|>"), id_of(tokenizer, "<call>")
    assert pieces[special] is None
    assert pieces[added] == b"<call>"
    assert pieces[id_of(tokenizer, "  ")] == b"  "
    assert pieces[-1] is None
    assert pieces[tokenizer.get_vocab_size() + 7] is None


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<call>"},
        {"pad_token": {"content": "<call>"}},
        {"additional_special_tokens": ["<call>"]},
        {"extra_special_tokens": {"call_token": "<call>"}},
    ],
)
def test_a_token_that_the_configuration_calls_special_is_special(
    config: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = byte_level()
    assert saved(tokenizer, tmp_path, **config)[id_of(tokenizer, "<call>")] is None
    decoder = {
        str(id_of(tokenizer, "  ")): {"content": "  ", "special": True},
        "9000": {"content": "new"},
    }
    pieces = saved(tokenizer, tmp_path, added_tokens_decoder=decoder)
    assert (pieces[id_of(tokenizer, "  ")], pieces[9000]) == (None, b"new")


def test_tokenizers_whose_text_is_not_their_tokens_bytes_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(NoPieces, match="WordPiece"):
        saved(tokenizer, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NoPieces, match="none"):
        load_pieces(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[1]")
    with pytest.raises(NoPieces, match="cannot be read"):
        load_pieces(tmp_path)


def test_a_model_is_found_in_its_directory_or_in_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert find_tokenizer(str(snapshot)) is None
    (snapshot / "tokenizer.json").write_text("{}")
    assert find_tokenizer(str(snapshot)) == snapshot
    assert find_tokenizer("owner/model") is None
    refs = tmp_path / "hub" / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert find_tokenizer("owner/model") == snapshot
    assert find_tokenizer("owner/other") is None
    assert find_tokenizer("../../etc") is None
