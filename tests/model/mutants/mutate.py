"""One mutation of a seed, drawn from a seeded generator."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
from dataclasses import replace
from typing import Any

from tests.model.mutants.gguf_pieces import GGUFModel, Piece
from tests.model.mutants.seeds import TEMPLATE, Seed, seeds, serialised

_ABSURD = (
    0,
    1,
    2,
    7,
    255,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_JSON_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, 1e-320,
    math.nan, math.inf, -math.inf, "", "x", "\ud800", "\x00", "x" * 5000, [], {}, [[]], {"": None},
    [0] * 1000, {"type": "ByteLevel"}, "NaN",
)  # fmt: skip
_GGUF_VALUES: tuple[Any, ...] = (
    0, 1, 2, 3, 31, 32, 64, (1 << 31) - 1, (1 << 32) - 1, 0.0, 1.0, -1.0, 1e-30, 3e38, math.nan, math.inf,
    -math.inf, True, False, "", "llama", "qwen3", "gpt2", "default", "yarn", "x" * 5000, [], [1], [1, 2],
    ["a"], ["a", "b"], [1.0], [math.nan], [True], ["x"] * 1000, [0] * 1000,
)  # fmt: skip


def _again(start: str, body: str, after: str = "", count: int = 99) -> str:
    """A template that does something to `n.s` again and again."""
    return f"{{% set n = namespace(s={start}) %}}{{% for i in range({count}) %}}{body}{{% endfor %}}{after}"


_REGEX = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
_LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
_TOKENIZER_PARTS: tuple[tuple[str, Any], ...] = (
    ("pre_tokenizer", _REGEX),
    ("pre_tokenizer", {**_REGEX, "pattern": {"Regex": "(((("}}),
    ("pre_tokenizer", {**_REGEX, "pattern": {"Regex": ""}}),
    ("normalizer", {"type": "Sequence", "normalizers": [_LONGER] * 5}),
    ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "a"}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 100}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA/////w=="}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "?"}),
    ("normalizer", {"type": "Prepend", "prepend": "x" * 5000}),
    ("decoder", {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}),
    ("decoder", {"type": "Sequence", "decoders": []}),
    ("model", {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}),
    ("model", {"type": "Unigram", "unk_id": 9, "vocab": [], "byte_fallback": True}),
    ("model", {"type": "WordLevel", "unk_token": "zz", "vocab": {"a": 0}}),
    ("model", {"type": "BPE", "vocab": {"a": 0, "b": (1 << 32) - 1}, "merges": []}),
    ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "missing"}),
    ("model", {"type": "BPE", "vocab": {"a": 0, "b": 0, "ab": 0}, "merges": [["a", "b"]]}),
    ("truncation", {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}),
    ("padding", {"strategy": {"Fixed": 1 << 60}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": ""}),
    ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                        "pair": [], "special_tokens": {}}),
)  # fmt: skip
_TEMPLATE_PARTS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% set x = 1 %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ 'x' * 9999999999999 }}",
    "{{ [0] * 999999999 }}",
    "{{ 10 ** 99999999 }}",
    "{{ messages * 99999999 }}",
    _again("'x'", "{% set n.s = n.s ~ n.s %}", "{{ n.s }}"),
    _again("'x'", "{% set n.s = n.s + n.s %}", "{{ n.s }}"),
    _again("[0]", "{% set n.s = n.s + n.s %}"),
    _again("'x'", "{% set n.s = n.s | replace('x', 'xx') %}"),
    _again("'x'", "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"),
    _again("9", "{% set n.s = n.s * n.s %}", "{{ n.s }}"),
    _again("'x'", "{% set n.s = [n.s, n.s] | join %}"),
    _again("'x'", "{% set n.s = n.s.replace('x', 'xx') %}"),
    _again("['x']", "{% set n.s = [n.s, n.s] %}", "{{ n.s }}"),
    _again("['x']", "{% set n.s = [n.s, n.s] %}", "{{ n.s|tojson }}", 40),
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in [[[[]]]] recursive %}{{ loop([[i]]) }}{% endfor %}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'.zfill(999999999) }}",
    "{{ 'a\tb'.expandtabs(999999999) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=999999999) }}",
    "{{ 'x\ny' | indent(999999999) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ messages | batch(999999999, 'x') | list }}",
    "{{ messages | slice(999999999) | list }}",
    "{{ lipsum(n=99999999) }}",
    "{{ range(99999) | list | join('x' * 99999) }}",
    "{{ ('x' * 99999) | wordwrap(1) }}",
    "{{ ('x ' * 99999) | urlize }}",
    "{{ ('xx' * 9999).replace('x', 'y' * 99999) }}",
    "{{ ('xx' * 9999).join(['y'] * 99999) }}",
    "{{ strftime_now('%c' * 99999) }}",
    "{{ strftime_now('%999999999Y') }}",
    "{{ raise_exception('x' * 99999) }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{% import 'x' as y %}",
    "{{ self.__init__ }}{{ cycler.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ undefined.x.y }}",
    "{{ messages[99] }}",
    "{{ messages[0].content.x.y }}",
    "{{ 1 // 0 }}",
    "{{ 1 | round(999999999) }}",
    "{{ '9' * 5000 | int }}",
    "{{ ('9' * 5000) | int }}",
    "{% set messages = 1 %}",
    "{% while true %}{% endwhile %}",
    "{% generation %}{% endgeneration %}",
    "{% break %}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ " + "-" * 3000 + "1 }}",
    "{{ " + "x.x" * 3000 + " }}",
    "{% if a %}" * 120 + "{% endif %}" * 120,
    "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "{% set " + ", ".join(f"a{i}" for i in range(300)) + " = 1 %}",
    "{{ " + " ~ ".join(["messages"] * 3000) + " }}",
    "{% raw %}", "{#", "{{", "%}", "\ud7ff", "\x00",
)  # fmt: skip


def mutant(seed: int, index: int) -> tuple[Seed, str]:
    """The index-th mutant of a run, and what was done to it. The first ones are the seeds as they are."""
    originals = seeds()
    if index < len(originals):
        return originals[index], "unchanged"
    rng = random.Random(f"{seed}:{index}")
    original = rng.choice(originals)
    parts = dict(original.parts)
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice(sorted(parts))
        how, parts[name] = _mutate_part(rng, parts[name])
        done.append(f"{name}: {how}")
    return replace(original, parts=parts), "; ".join(done)


def _mutate_part(rng: random.Random, part: Any) -> tuple[str, Any]:
    if isinstance(part, GGUFModel):
        return _mutate_gguf(rng, part) if rng.random() < 0.4 else _mutate_pieces(rng, part.pieces())
    if isinstance(part, list) and part and isinstance(part[0], Piece) and rng.random() < 0.8:
        return _mutate_pieces(rng, list(part))
    if isinstance(part, dict) and rng.random() < 0.8:
        if "normalizer" in part and rng.random() < 0.3:
            key, value = rng.choice(_TOKENIZER_PARTS)
            return f"{key} {value.get('type', '')}", {**part, key: value}
        return _mutate_json(rng, copy.deepcopy(part))
    if part == TEMPLATE.encode() and rng.random() < 0.8:
        return "template", _template(rng).encode("utf-8", "replace")
    return _mutate_file(rng, serialised(part))


def _mutate_file(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    if content[8:10] == b'{"' and rng.random() < 0.6:
        with contextlib.suppress(ValueError):
            return _mutate_safetensors(rng, content)
    return _mutate_bytes(rng, bytearray(content))


def _mutate_gguf(rng: random.Random, model: GGUFModel) -> tuple[str, GGUFModel]:
    """Well-formed, but with another value, type or tensor than expected."""
    entries, tensors = dict(model.entries), dict(model.tensors)
    how = rng.choice(("value", "value", "value", "item", "drop", "shape", "rename", "lose"))
    key, name = rng.choice(sorted(entries)), rng.choice(sorted(tensors))
    kind, shape = tensors[name]
    match how:
        case "drop":
            del entries[key]
        case "item" if isinstance(entries[key], list):
            items = list(entries[key])
            items[rng.randrange(len(items))] = _gguf_item(rng, items[0])
            entries[key] = items
        case "shape":
            tensors[name] = (kind, rng.choice(((32,), (*shape, 1), shape[::-1], (2 * shape[0], *shape[1:]))))
        case "rename":
            tensors[f"{name}{rng.choice(('', '.x', '.bias'))}"] = tensors.pop(name)
        case "lose":
            del tensors[name]
        case _:
            entries[key] = rng.choice(_GGUF_VALUES)
    return f"{how} {key} {name}", GGUFModel(entries, tensors)


def _gguf_item(rng: random.Random, like: Any) -> Any:
    if isinstance(like, str):
        return rng.choice(
            ("", " ", "h e", "h  e", "zz zz", "<|im_end|>", "x" * 3000, "\x00", "▁", "<0xZZ>", "<0x0A>")
        )
    if isinstance(like, float):
        return rng.choice((math.nan, math.inf, -math.inf, 0.0))
    return rng.choice((0, 1, 2, 3, 4, 5, 6, 99, (1 << 32) - 1))


def _mutate_pieces(rng: random.Random, pieces: list[Piece]) -> tuple[str, list[Piece]]:
    """Aim at one piece: the likelier, the fewer there are of its role (counts before texts)."""
    present = {piece.role for piece in pieces}
    roles = ("u32", "u32", "u64", "u64", "u64", "text", "value", "data", "magic")
    role = rng.choice([role for role in roles if role in present])
    at = rng.choice([i for i, piece in enumerate(pieces) if piece.role == role])
    piece = pieces[at]
    how = rng.choice(("absurd", "near", "drop", "twice", "swap"))
    templates = [i for i, p in enumerate(pieces) if p.content == TEMPLATE.encode()]
    if templates and (at in templates or (role == "text" and rng.random() < 0.1)):
        at = templates[0]
        content = _template(rng).encode("utf-8", "replace")
        pieces[at - 1] = Piece("u64", len(content).to_bytes(8, "little"))
        pieces[at] = Piece("text", content)
        return "template", pieces
    if how == "drop":
        del pieces[at]
    elif how == "twice":
        pieces.insert(at, piece)
    elif how == "swap":
        other = rng.choice([i for i, p in enumerate(pieces) if p.role == role])
        pieces[at], pieces[other] = pieces[other], piece
    else:
        size = len(piece.content)
        value = int.from_bytes(piece.content, "little")
        new = (
            rng.choice(_ABSURD) if how == "absurd" else value + rng.choice((-32, -8, -1, 1, 2, 8, 32, value))
        )
        pieces[at] = Piece(role, (new % (1 << 8 * size)).to_bytes(size, "little"))
    return f"{how} {role} piece {at}", pieces


def _mutate_json(rng: random.Random, value: Any) -> tuple[str, Any]:
    places = list(_places(value)) if isinstance(value, (dict, list)) else []
    if not places:
        return "value at the top", rng.choice(_JSON_VALUES)
    container, key = rng.choice(places)
    how = rng.choice(("value", "value", "value", "drop", "near", "nest", "template"))
    if how == "template":
        where = [(box, at) for box, at in places if box[at] == TEMPLATE]
        if where:
            box, at = rng.choice(where)
            box[at] = _template(rng)
            return how, value
        how = "value"
    if how == "drop":
        del container[key]
    elif how == "near" and type(container[key]) in (int, float):
        container[key] = container[key] * rng.choice((-1, 0, 2, 1e300)) + rng.choice((0, 1))
    elif how == "nest":
        inner = container[key]
        for _ in range(rng.choice((1, 2, 100))):
            inner = [inner]
        container[key] = inner
    else:
        container[key] = copy.deepcopy(rng.choice(_JSON_VALUES))
    return f"{how} at {key!r}"[:60], value


def _places(value: Any) -> Any:
    """(container, key) of every value below, the long lists by their first items."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))[:8]
    if isinstance(value, dict) and len(items) > 40:
        items = items[:8]
    for key, inner in items:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _mutate_safetensors(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """A change in the header, its length kept true."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    how, header = _mutate_json(rng, header)
    changed = json.dumps(header).encode()
    return f"header {how}", len(changed).to_bytes(8, "little") + changed + content[8 + size :]


def _mutate_bytes(rng: random.Random, content: bytearray) -> tuple[str, bytes]:
    how = rng.choice(("truncate", "flip", "flip", "absurd", "delete", "repeat", "noise", "empty"))
    # Headers are where the meaning is.
    span = len(content) if rng.random() < 0.5 else min(len(content), 200)
    at = rng.randrange(span) if span else 0
    end = min(len(content), at + rng.choice((1, 8, 100)))
    match how:
        case "truncate":
            del content[at:]
        case "flip" if content:
            content[at] ^= 1 << rng.randrange(8)
        case "absurd":
            content[at : at + 8] = rng.choice(_ABSURD).to_bytes(8, "little")
        case "delete":
            del content[at:end]
        case "repeat":
            content[at:at] = content[at:end] * rng.choice((1, 2, 1000))
        case "noise":
            content[at:end] = rng.randbytes(end - at)
        case _:
            content.clear()
    return f"{how} at byte {at}", bytes(content)


def _template(rng: random.Random) -> str:
    part = rng.choice(_TEMPLATE_PARTS)
    match rng.randrange(4):
        case 0:
            return part
        case 1:
            return TEMPLATE + part
        case 2:
            at = rng.randrange(len(TEMPLATE))
            return TEMPLATE[:at] + part + TEMPLATE[at:]
        case _:
            return "{% for m in messages %}" + part + rng.choice(_TEMPLATE_PARTS) + "{% endfor %}"
