"""Vocabularies for tokenizer tests, and a reference encoder written from the algorithm."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import regex

from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.model.gguf_file import GGUFFile
from dynamictp.model.load import demo_path, open_model
from dynamictp.model.tokenizer import Tokenizer

TEXTS = [
    "Hello, world!",
    "In 2024, 1234567 tokens cost $3.50 — 10%.",
    "  two leading spaces\n\n\ttab  and trailing  ",
    "def f(x):\n    return {'a': [x ** 2, 0xFF]}  # it's ok, we'll see\r\n",
    "你好，世界。今天是2025年。",
    "emoji 🎉👩‍👩‍👧‍👦🇩🇪 done",
    "Ünïcödé, İstanbul, ﬁne, e\u0301",
    "a\u200bb ½ ² Ⅷ ٣٤٥",
    "camelCaseWords HTTPServer ABCdef",
    "<|im_start|>user\nhi<|im_end|> and <|endoftext|>text <|im_start",
    "",
    " ",
    "\n",
]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


class ReferenceBPE:
    """Byte-pair encoding the slow way: cut by pattern, then join the pair of lowest rank again and again."""

    def __init__(self, file: GGUFFile, *patterns: str, ignore_merges: bool = False) -> None:
        self.vocab = {token: i for i, token in enumerate(file.strings("tokenizer.ggml.tokens"))}
        merges = [tuple(line.split(" ")) for line in file.strings("tokenizer.ggml.merges")]
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        types = file.get("tokenizer.ggml.token_type")
        special = [token for token, i in self.vocab.items() if types[i] == gguf.TokenType.CONTROL]
        self.special = regex.compile(
            "(" + "|".join(map(regex.escape, sorted(special, key=len, reverse=True))) + ")"
        )
        self.patterns = [regex.compile(pattern) for pattern in patterns]
        self.ignore_merges = ignore_merges
        self.letters = letters()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(self.special.split(text)):
            if i % 2:
                ids.append(self.vocab[piece])
            else:
                words = [piece]
                for pattern in self.patterns:
                    words = [part for word in words for part in self._cut(pattern, word)]
                ids += [token for word in words for token in self._word(word)]
        return ids

    @staticmethod
    def _cut(pattern: Any, word: str) -> list[str]:
        """Matches of `pattern` and what lies between them."""
        parts, end = [], 0
        for match in pattern.finditer(word):
            parts += [word[end : match.start()], match.group()]
            end = match.end()
        return [part for part in [*parts, word[end:]] if part]

    def _word(self, word: str) -> list[int]:
        symbols = [self.letters[byte] for byte in word.encode()]
        whole = "".join(symbols)
        if self.ignore_merges and whole in self.vocab:
            return [self.vocab[whole]]
        while len(symbols) > 1:
            ranked = [(self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(symbols))]
            rank, i = min(ranked)
            if rank == 1 << 30:
                break
            symbols[i : i + 2] = ["".join(symbols[i : i + 2])]
        return [self.vocab[symbol] for symbol in symbols]


@cache
def demo_tokenizer() -> Tokenizer:
    """The demo model's; a function, because property tests can't take a fixture per example."""
    return open_model("demo").tokenizer()


def spelled(data: bytes) -> str:
    return "".join(letters()[byte] for byte in data)


def letters() -> list[str]:
    """The character that stands for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def make_facts(vocab: int = 49152, eos: tuple[int, ...] = (2,)) -> ModelFacts:
    return ModelFacts(
        family="llama",
        layers=1,
        hidden=64,
        query_heads=1,
        kv_heads=1,
        head_dim=64,
        intermediate=64,
        vocab=vocab,
        max_context=64,
        norm_eps=1e-5,
        rope=RopeFacts(theta=1e4),
        eos_ids=eos,
    )


def write_vocabulary(
    path: Path,
    *,
    model: str = "gpt2",
    pre: str | None = "smollm",
    tokens: list[str] | None = None,
    types: list[int] | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    bos: int = 1,
    eos: int = 2,
    unk: int | None = None,
    **flags: bool,
) -> GGUFFile:
    """A GGUF file that has a vocabulary (the demo model's unless given) and nothing else."""
    if tokens is None:
        source = GGUFFile(demo_path())
        tokens, types = source.strings("tokenizer.ggml.tokens"), source.get("tokenizer.ggml.token_type")
        merges = source.strings("tokenizer.ggml.merges")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types or [])
    if merges:
        writer.add_token_merges(merges)
    elif model == "gpt2":
        writer.add_array("tokenizer.ggml.merges", [])
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    if unk is not None:
        writer.add_unk_token_id(unk)
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)
