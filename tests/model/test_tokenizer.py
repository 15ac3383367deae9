"""Tokenizers of folders, texts a request can bring, and streams that decode like whole texts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from dynamictp.errors import BadRequest, ModelRefused
from dynamictp.model.gguf_tokenizer import tokenizer_from_gguf
from dynamictp.model.load import open_model
from dynamictp.model.tokenizer import IncrementalDecoder, Tokenizer, tokenizer_from_folder
from tests.model.vocabularies import TEXTS, demo_tokenizer, letters, make_facts, spelled, write_vocabulary

Maker = Callable[[str], Path]

# --- folders ----------------------------------------------------------------------------------------------


def test_a_saved_tokenizer_gives_the_ids_of_transformers(demo: Tokenizer, tmp_path: Path) -> None:
    demo.backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_from_folder(tmp_path, make_facts(eos=(0,)))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == reference(text)["input_ids"] == demo.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert (ours.eos_ids, ours.bos_id, ours.vocab_size) == ((0, 2), 1, 49152)
    assert ours.special_ids == demo.special_ids


def test_add_bos_token_overrides_the_file(demo: Tokenizer, tmp_path: Path) -> None:
    demo.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"add_bos_token": True, "bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_from_folder(tmp_path, make_facts())
    assert tokenizer.encode("hi") == [1, *demo.encode("hi")]
    assert tokenizer.encode("hi", add_special_tokens=False) == demo.encode("hi")


def test_folders_without_a_sound_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"no tokenizer\.json"):
        tokenizer_from_folder(tmp_path, make_facts())
    for content in ["", "{}", '{"model": {"type": "BPE"}}', "[]"]:
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelRefused, match="not a sound tokenizer file"):
            tokenizer_from_folder(tmp_path, make_facts())
    word_piece = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    word_piece.decoder = tokenizers.decoders.WordPiece()
    word_piece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelRefused, match="decoder 'WordPiece' is not supported"):
        tokenizer_from_folder(tmp_path, make_facts())


# --- text that a request can bring ------------------------------------------------------------------------


def test_lone_surrogates_are_a_bad_request(demo: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="not valid Unicode"):
        demo.encode("a\ud800b")


def test_other_threads_run_while_a_long_text_is_encoded(demo: Tokenizer) -> None:
    stalls = [0.0]
    done = Event()

    def watch() -> None:
        last = time.monotonic()
        while not done.wait(0.001):
            now = time.monotonic()
            stalls.append(now - last)
            last = now
        stalls.append(time.monotonic() - last)

    watcher = Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    ids = demo.encode("1" * 400_000)
    took = time.monotonic() - began
    done.set()
    watcher.join()
    assert len(ids) == 400_000
    assert max(stalls) < 0.7 * took


def test_tokens_beyond_the_embedding_are_a_bad_request(demo: Tokenizer, tmp_path: Path) -> None:
    demo.backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path, make_facts(vocab=1000))
    assert max(tokenizer.encode("in")) < 1000
    with pytest.raises(BadRequest, match="which this model lacks"):
        tokenizer.encode("Photosynthesis")


def test_ids_without_a_text_are_empty(demo: Tokenizer) -> None:
    assert demo.token_bytes(49152) == b""
    assert demo.token_bytes(-1) == b""
    assert demo.decode([49999, *demo.encode("ok")]) == "ok"


# --- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_decodes_like_the_whole(demo: Tokenizer, text: str, skip: bool) -> None:
    ids = demo.encode(text)
    decoder = IncrementalDecoder(demo, skip_special_tokens=skip)
    deltas = [decoder.push(token) for token in ids]
    assert "".join(deltas) + decoder.flush() == demo.decode(ids, skip)
    assert not any("\ufffd" in delta for delta in deltas)


@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_any_ids_decode_like_the_library(ids: list[int], skip: bool) -> None:
    tokenizer = demo_tokenizer()
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    streamed = "".join([decoder.push(token) for token in ids]) + decoder.flush()
    assert streamed == tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


def test_a_token_may_hold_a_character_and_half_of_the_next(tmp_path: Path) -> None:
    # "é" is C3 A9; the second token holds the first é's end and the second é's start.
    start, end = spelled(b"\xc3"), spelled(b"\xa9")
    middle = end + start
    tokens = [*letters(), middle]
    file = write_vocabulary(
        tmp_path / "v.gguf", tokens=tokens, types=[1] * 257, merges=[f"{end} {start}"], bos=0, eos=0
    )
    tokenizer = tokenizer_from_gguf(file, make_facts())
    ids = tokenizer.encode("éé")
    assert [tokenizer.token_bytes(token) for token in ids] == [b"\xc3", b"\xa9\xc3", b"\xa9"]
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(token) for token in ids] == ["", "é", "é"]
    assert decoder.flush() == ""


def test_flush_shows_an_incomplete_character(demo: Tokenizer) -> None:
    decoder = IncrementalDecoder(demo)
    first = demo.encode("🎉")[0]
    assert decoder.push(first) == ""
    assert decoder.flush() == "\ufffd"
    assert demo.token_text(first) == "\ufffd"


def test_small_checkpoints_have_a_tokenizer_that_fits(checkpoint: Maker, gguf_checkpoint: Maker) -> None:
    folder, file = open_model(str(checkpoint("llama"))), open_model(str(gguf_checkpoint("llama")))
    one, two = folder.tokenizer(), file.tokenizer()
    assert one.vocab_size == two.vocab_size == folder.facts.vocab == 1000
    for text in TEXTS:
        assert one.encode(text) == two.encode(text)
        assert one.decode(one.encode(text), skip_special_tokens=False) == text
    assert (one.eos_ids, one.bos_id) == (two.eos_ids, two.bos_id) == ((2,), 1)
