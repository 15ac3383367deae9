"""GGUF metadata → `Tokenizer`.

The file has the vocabulary and merges, and only names its pre-tokenizer (`tokenizer.ggml.pre`). Loaders that
drop the name cut text differently from training: SmolLM splits every digit, Llama 3 groups three.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts
from dynamictp.model.gguf_file import GGUFFile
from dynamictp.model.tokenizer import ByteCoding, Tokenizer, add_boundary_tokens
from dynamictp.model.tokenizer_file import sound

SUPPORTED_MODELS = ("gpt2", "llama")
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# The models' published split patterns; they differ in how digits group and where letters join.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


class _Pre(NamedTuple):
    """How one family cuts text before byte pairs are merged."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    """A word that is a token is taken whole, whatever the merges say."""
    add_bos: bool = False
    """Default where the file does not say."""
    nfc: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return build


_LLAMA3_PRE = _Pre(_split(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_PRE = _Pre(_split(_QWEN2), nfc=True)
_PRE_TOKENIZERS = {
    "smollm": _Pre(_single_digits),
    "starcoder": _Pre(_single_digits),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "tekken": _Pre(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    "gpt-2": _Pre(_gpt2),
    "default": _Pre(_gpt2),
}


def tokenizer_from_gguf(file: GGUFFile, facts: ModelFacts) -> Tokenizer:
    """The tokenizer that `file` describes. Raises `ModelRefused` naming a kind that is not supported."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in SUPPORTED_MODELS:
        raise ModelRefused(
            f"{file.path}: tokenizer model {kind!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_MODELS)}"
        )
    tokens = file.strings("tokenizer.ggml.tokens")
    if len(tokens) > facts.vocab:
        raise ModelRefused(f"{file.path}: {len(tokens)} tokens, but the embedding has {facts.vocab} rows")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelRefused(f"{file.path}: token {twice!r} appears twice in the vocabulary")
    types = _types(file, len(tokens))
    coding: ByteCoding = "byte_level" if kind == "gpt2" else "sentencepiece"
    if coding == "byte_level":
        pre = _pre_tokenizer(file)
        backend, add_bos = _byte_level(file, vocab, pre), pre.add_bos
    else:
        backend, add_bos = _sentencepiece(file, vocab, tokens, types), True
    _add_tokens(backend, tokens, types)
    special_tokens = special_tokens_from_gguf(file)
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    add_boundary_tokens(
        backend,
        bos=bos if file.flag("tokenizer.ggml.add_bos_token", add_bos) else None,
        eos=eos if file.flag("tokenizer.ggml.add_eos_token", False) else None,
    )
    return Tokenizer(
        backend,
        coding=coding,
        special_tokens=special_tokens,
        id_limit=facts.vocab,
        eos_ids=facts.eos_ids,
        bos_id=facts.bos_id,
    )


def _pre_tokenizer(file: GGUFFile) -> _Pre:
    name = file.text("tokenizer.ggml.pre")
    if name is None and file.get("general.architecture") in ("qwen2", "qwen3"):
        name = "qwen2"  # files older than the key; the architecture has had one pre-tokenizer only
    if name not in _PRE_TOKENIZERS:
        found = (
            "tokenizer.ggml.pre is missing: convert the model again"
            if name is None
            else f"pre-tokenizer {name!r}"
        )
        raise ModelRefused(f"{file.path}: {found}; supported: {', '.join(_PRE_TOKENIZERS)}")
    return _PRE_TOKENIZERS[name]


def _types(file: GGUFFile, count: int) -> list[int]:
    types = file.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != count or not all(type(kind) is int for kind in types):
        raise ModelRefused(
            f"{file.path}: tokenizer.ggml.token_type does not give a type for each of {count} tokens"
        )
    return types


def _byte_level(file: GGUFFile, vocab: dict[str, int], pre: _Pre) -> tokenizers.Tokenizer:
    merges = [_pair(line, file) for line in file.strings("tokenizer.ggml.merges")]
    with sound(f"{file.path}: merges do not fit the vocabulary"):
        model = models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(line: str, file: GGUFFile) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space:
        raise ModelRefused(f"{file.path}: merge {line!r} is not a pair of tokens")
    return left, right


def _sentencepiece(
    file: GGUFFile, vocab: dict[str, int], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    scores = file.get("tokenizer.ggml.scores")
    complete = isinstance(scores, list) and len(scores) == len(tokens)
    if not complete or not all(type(score) in (int, float) for score in scores):
        raise ModelRefused(f"{file.path}: tokenizer.ggml.scores does not give a score for each token")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    with sound(f"{file.path}: not a sound vocabulary"):
        model = models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    backend = tokenizers.Tokenizer(model)
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps a score per token instead of merges: every way to join two tokens into a third is a
    merge, the higher the third's score the earlier."""
    found: list[tuple[float, int, int, str, str]] = []
    lengths = sorted({len(token) for token in vocab})  # a long token has few places to cut
    for token, i in vocab.items():
        for cut in lengths[: bisect_left(lengths, len(token))]:
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[i], vocab[left], vocab[right], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    for token, kind in zip(tokens, types, strict=True):
        if not token:
            continue
        if kind in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])


def special_tokens_from_gguf(file: GGUFFile) -> dict[str, str]:
    """Texts of the special tokens by role. Raises `ModelRefused` for an id outside the vocabulary."""
    tokens = file.strings("tokenizer.ggml.tokens")
    roles = {}
    for name, role in _ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in file.keys:
            token = file.integer(key)
            if not 0 <= token < len(tokens):
                raise ModelRefused(f"{file.path}: {key} is {token}, outside the vocabulary of {len(tokens)}")
            roles[role] = tokens[token]
    return roles
