"""Text ↔ token ids, over the `tokenizers` library, and the decoder of a growing stream.

Streams are decoded from the bytes of each token, not by decoding ever longer id lists: it costs the same for
every token, and characters that are cut over several tokens come out whole.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import processors

from dynamictp.errors import BadRequest, ModelRefused
from dynamictp.facts import ModelFacts
from dynamictp.model.config_json import read_json
from dynamictp.model.tokenizer_file import is_failure, read_tokenizer_file, sound

_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_WORD_BOUNDARY = "▁"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

ByteCoding = Literal["byte_level", "sentencepiece"]
"""How a vocabulary spells bytes: GPT-2's printable alphabet, or `▁` for a space and `<0xNN>` for a byte."""


class Tokenizer:
    """One model's tokenizer. Immutable after construction, except for a cache of token bytes; thread-safe.

    Special tokens that are spelled out in a text are recognised, as other servers do.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        coding: ByteCoding,
        special_tokens: Mapping[str, str],
        id_limit: int,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
    ) -> None:
        """`special_tokens` maps roles (`bos_token`, `eos_token`, …) to their text, for chat templates.

        `id_limit` is the rows of the embedding: a tokenizer may know ids that the model does not.
        `bos_id` and `eos_ids` are what the model declares; the roles' ids are added to them.
        """
        self._backend = backend
        self._coding = coding
        self.special_tokens = dict(special_tokens)
        self._added = {token: added.content for token, added in backend.get_added_tokens_decoder().items()}
        self._special = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        eos = _id_of(backend, special_tokens.get("eos_token"))
        bos = _id_of(backend, special_tokens.get("bos_token"))
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *(() if eos is None else (eos,))}))
        self.bos_id: int | None = bos_id if bos is None else bos
        self._id_limit = id_limit
        self._bytes: dict[int, bytes] = {}

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, to save or compare; not to be changed."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Tokens with a text, added ones included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: left out of decoded text when `skip_special_tokens`."""
        return self._special

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` lets the model's own rule add e.g. the begin token.

        Other threads run meanwhile: a megabyte takes a second, which nobody else should wait for.
        Raises `BadRequest` for text that is not Unicode (lone surrogates), has a token the model lacks, or on
        which the library gives up.
        """
        try:
            # The library holds the interpreter lock while it encodes one text, and not for a batch.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise BadRequest(f"the text is not valid Unicode: {error}") from error
        except BaseException as error:
            # A vocabulary without a token for everything, or a pattern that gives up on this text.
            if not is_failure(error):
                raise
            raise BadRequest(f"this model's tokenizer can't encode the text: {str(error)[:200]}") from error
        if self.vocab_size > self._id_limit and (
            beyond := [token for token in ids if token >= self._id_limit]
        ):
            raise BadRequest(f"the text has the token {self.token_text(beyond[0])!r}, which this model lacks")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Bytes that are not UTF-8 become U+FFFD; unknown ids have no text."""
        text = b"".join(
            b"" if skip_special_tokens and token in self._special else self.token_bytes(token)
            for token in ids
        ).decode("utf-8", "replace")
        # SentencePiece marks the start of a text like a space before a word.
        return text[1:] if self._coding == "sentencepiece" and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token adds to a text, special tokens spelled out; empty for an unknown id."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spell(token)
        return known

    def token_text(self, token: int) -> str:
        """`token_bytes` as text, for display: an incomplete character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def _spell(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._coding == "byte_level":
            if all(char in _BYTE_OF for char in text):
                return bytes(_BYTE_OF[char] for char in text)
            return text.encode()
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(byte[1])
        return text.replace(_WORD_BOUNDARY, " ").encode()


class IncrementalDecoder:
    """Text of one growing stream of tokens. Holds back the bytes of an incomplete character.

    The concatenation of all deltas is the decoded text of the tokens, without the removal of a leading
    space: a stream usually continues a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that became complete with `token`; often empty within a character."""
        return "" if token in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What was held back, at the end of the stream: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


def tokenizer_from_folder(folder: Path, facts: ModelFacts) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: `tokenizer.json` and, when there, `tokenizer_config.json`.

    Raises `ModelRefused` when `tokenizer.json` is missing, unsound or of a kind that is not implemented.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelRefused(f"{folder}: no tokenizer.json; save the model with a fast tokenizer")
    backend, layout = read_tokenizer_file(file)
    backend.no_truncation()
    backend.no_padding()
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.exists() else {}
    special_tokens = special_tokens_from_folder(folder)
    _follow_config(backend, config, special_tokens)
    return Tokenizer(
        backend,
        coding=_coding(layout, str(file)),
        special_tokens=special_tokens,
        id_limit=facts.vocab,
        eos_ids=facts.eos_ids,
        bos_id=facts.bos_id,
    )


def special_tokens_from_folder(folder: Path) -> dict[str, str]:
    """Texts of the special tokens by role, from `tokenizer_config.json` before `special_tokens_map.json`."""
    roles: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        for role, value in (read_json(file) if file.exists() else {}).items():
            content = value.get("content") if isinstance(value, dict) else value
            if role in _SPECIAL_ROLES and isinstance(content, str):
                roles[role] = content
    return roles


def add_boundary_tokens(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `backend` put the tokens `bos` and `eos` (None: neither) around an encoded text."""
    added = [(text, backend.token_to_id(text)) for text in (bos, eos) if text is not None]
    if any(token is None for _, token in added):
        raise ModelRefused(f"the tokenizer has no token for one of {[text for text, _ in added]}")
    template = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
    with sound(f"the tokenizer can't put {bos!r} and {eos!r} around a text"):
        backend.post_processor = processors.TemplateProcessing(
            single=template, pair=None, special_tokens=added
        )


def _follow_config(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """`add_bos_token` and `add_eos_token`, where given, override the rule in `tokenizer.json`."""
    if "add_bos_token" in config or "add_eos_token" in config:
        add_boundary_tokens(
            backend,
            bos=special.get("bos_token") if config.get("add_bos_token") else None,
            eos=special.get("eos_token") if config.get("add_eos_token") else None,
        )


def _id_of(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    token: int | None = None if text is None else backend.token_to_id(text)
    return token


def _coding(layout: Mapping[str, Any], where: str) -> ByteCoding:
    decoder = layout.get("decoder") or {}
    steps = {step.get("type") for step in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in steps:
        return "byte_level"
    if steps & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    raise ModelRefused(
        f"{where}: decoder {decoder.get('type')!r} is not supported; "
        "supported: ByteLevel, ByteFallback, Metaspace"
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: bytes that print stand for themselves, the rest
    follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
