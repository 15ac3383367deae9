"""Token ids from GGUF vocabularies equal those of references written from the algorithms."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, trainers

from dynamictp.errors import ModelRefused
from dynamictp.model.gguf_file import GGUFFile
from dynamictp.model.gguf_tokenizer import tokenizer_from_gguf
from dynamictp.model.load import demo_path
from dynamictp.model.tokenizer import IncrementalDecoder, Tokenizer
from tests.model.vocabularies import (
    TEXTS,
    ReferenceBPE,
    demo_tokenizer,
    letters,
    make_facts,
    write_vocabulary,
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


@pytest.mark.parametrize("text", TEXTS)
def test_demo_ids_equal_the_reference(demo: Tokenizer, text: str) -> None:
    reference = ReferenceBPE(GGUFFile(demo_path()), r"\p{N}", GPT2)
    assert demo.encode(text) == reference.encode(text)
    assert demo.decode(demo.encode(text), skip_special_tokens=False) == text


# The demo vocabulary lacks a few control characters and the bytes that rarer planes begin with.
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x1FFFF)))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert demo_tokenizer().decode(demo_tokenizer().encode(text), skip_special_tokens=False) == text


def test_every_digit_is_a_token_of_its_own(demo: Tokenizer) -> None:
    assert [demo.token_text(token) for token in demo.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]


@pytest.mark.parametrize(
    ("pre", "patterns", "ignore_merges"),
    [
        ("gpt-2", [GPT2], False),
        ("default", [GPT2], False),
        ("starcoder", [r"\p{N}", GPT2], False),
        ("llama-bpe", [LLAMA3], True),
        ("qwen2", [QWEN2], False),
    ],
)
def test_every_pre_tokenizer_equals_its_reference(
    tmp_path: Path, pre: str, patterns: list[str], ignore_merges: bool
) -> None:
    file = write_vocabulary(tmp_path / "v.gguf", pre=pre)
    tokenizer = tokenizer_from_gguf(file, make_facts())
    reference = ReferenceBPE(file, *patterns, ignore_merges=ignore_merges)
    for text in TEXTS:
        if pre == "qwen2":
            text = str(normalizers.NFC().normalize_str(text))
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text


def test_qwen_composes_characters_before_splitting(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", pre="qwen2"), make_facts())
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_tekken_starts_words_at_capitals(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", pre="tekken"), make_facts())
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("HTTPServer helloWorld 42")
    assert [piece for piece, _ in pieces] == ["HTTPServer", "Ġhello", "World", "Ġ", "4", "2"]


def test_unknown_pre_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="pre-tokenizer 'falcon'; supported: smollm"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", pre="falcon"), make_facts())
    with pytest.raises(ModelRefused, match="convert the model again"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "w.gguf", pre=None), make_facts())
    with pytest.raises(ModelRefused, match="tokenizer model 'bert' is not supported; supported: gpt2, llama"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "x.gguf", model="bert"), make_facts())


@pytest.mark.parametrize(
    ("pre", "flags", "expected"),
    [
        ("smollm", {}, []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [1, 2]),
        ("llama-bpe", {}, [1]),
        ("llama-bpe", {"add_bos_token": False}, []),
    ],
)
def test_begin_and_end_tokens_follow_the_file(
    tmp_path: Path, pre: str, flags: dict[str, bool], expected: list[int]
) -> None:
    tokenizer = tokenizer_from_gguf(write_vocabulary(tmp_path / "v.gguf", pre=pre, **flags), make_facts())
    assert tokenizer.encode("", add_special_tokens=True) == expected
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_token_types_decide_what_is_special(tmp_path: Path) -> None:
    tokens = [*letters(), "<ctrl>", "<user tag>", "ab"]
    types = [1] * 256 + [3, 4, 1]
    file = write_vocabulary(tmp_path / "v.gguf", tokens=tokens, types=types, merges=["a b"], bos=256, eos=256)
    tokenizer = tokenizer_from_gguf(file, make_facts(eos=(256,)))
    ids = tokenizer.encode("ab<ctrl><user tag>ab")
    assert ids == [258, 256, 257, 258]
    assert tokenizer.decode(ids) == "ab<user tag>ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<ctrl><user tag>ab"
    assert tokenizer.special_ids == {256}


def test_corrupt_vocabularies_are_refused(tmp_path: Path) -> None:
    alphabet = letters()
    for change, named in [
        ({"tokens": [*alphabet, "a"], "types": [1] * 257}, "appears twice"),
        ({"tokens": alphabet, "types": [1] * 9}, "type for each"),
        ({"tokens": alphabet, "types": [1] * 256, "merges": ["a b"]}, "merges do not fit"),
        ({"tokens": alphabet, "types": [1] * 256, "merges": ["ab"]}, "not a pair"),
        (
            {"tokens": [*alphabet, "ab"], "types": [1] * 257, "merges": ["a b"], "bos": 257},
            "outside the vocabulary",
        ),
    ]:
        file = write_vocabulary(tmp_path / "v.gguf", **{"merges": [], "bos": 0, "eos": 0, **change})
        with pytest.raises(ModelRefused, match=named):
            tokenizer_from_gguf(file, make_facts())
    with pytest.raises(ModelRefused, match="embedding has 100 rows"):
        tokenizer_from_gguf(write_vocabulary(tmp_path / "w.gguf"), make_facts(vocab=100))


# --- SentencePiece ----------------------------------------------------------------------------------------


def sentencepiece_ids(tokens: list[str], scores: list[float], text: str) -> list[int]:
    """SentencePiece's BPE: join the adjacent pair whose union scores best; bytes for the rest."""
    vocab = {token: i for i, token in enumerate(tokens)}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-scores[vocab[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in vocab]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [vocab[symbol]] if symbol in vocab else [vocab[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, list[str], list[float]]:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    corpus = [word for text in TEXTS[:5] for word in text.split()] * 3 + [
        "the theme of these other things is this"
    ]
    trained.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *learned]
    types = [2, 3, 3] + [6] * 256 + [1] * len(learned)
    scores = [0.0] * 259 + [-float(i) for i in range(len(learned))]
    path = tmp_path_factory.mktemp("spm") / "v.gguf"
    file = write_vocabulary(
        path, model="llama", pre="default", tokens=tokens, types=types, scores=scores, unk=0
    )
    return tokenizer_from_gguf(file, make_facts()), tokens, scores


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_sentencepiece_ids_equal_the_reference(
    sentencepiece: tuple[Tokenizer, list[str], list[float]], text: str
) -> None:
    tokenizer, tokens, scores = sentencepiece
    ids = tokenizer.encode(text)
    assert ids == [1, *sentencepiece_ids(tokens, scores, text)]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_sentencepiece_streams_keep_the_space_before_a_word(
    sentencepiece: tuple[Tokenizer, list[str], list[float]],
) -> None:
    tokenizer, *_ = sentencepiece
    decoder = IncrementalDecoder(tokenizer)
    ids = tokenizer.encode("the theme 🎉")
    assert "".join(map(decoder.push, ids)) + decoder.flush() == " the theme 🎉"


# --- against another loader -------------------------------------------------------------------------------


def test_the_gguf_loader_of_transformers_agrees_where_no_digit_is(demo: Tokenizer) -> None:
    place = demo_path()
    reference = transformers.AutoTokenizer.from_pretrained(str(place.parent), gguf_file=place.name)
    for text in TEXTS:
        if not any(char.isnumeric() for char in text):
            assert demo.encode(text) == reference(text)["input_ids"], text
