"""What mutants have found, each as the smallest file that does it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dynamictp.errors import BadRequest, ConfigError, ModelRefused
from dynamictp.model.chat import MAX_TEMPLATE_CHARS, ChatTemplate, template_from_file, template_from_folder
from dynamictp.model.config_json import facts_from_config, read_json
from dynamictp.model.load import open_model
from tests.model.mutants.gguf_pieces import GGUFModel, Piece
from tests.model.mutants.seeds import Seed, seeds, serialised
from tests.model.test_config_json import LLAMA

USER = [{"role": "user", "content": "hi"}]


def seed(name: str) -> Seed:
    return next(seed for seed in seeds() if seed.name == name)


@pytest.mark.parametrize(
    "path", ["x" * 5000, "~nobody-of-this-name/model", "a\0b", "/dev/null/model", "loop/m"]
)
def test_paths_that_lead_nowhere_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ModelRefused):
        open_model(path)


# --- config.json ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**400, math.inf, math.nan])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_numbers_beyond_every_float_are_refused(key: str, value: float) -> None:
    with pytest.raises(ModelRefused, match=f"{key} is .*, expected a finite number"):
        facts_from_config({**LLAMA, key: value})


@pytest.mark.parametrize("betas", [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, 2.0)])
def test_yarn_without_a_ramp_is_refused(betas: tuple[float, float]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "beta_fast": betas[0], "beta_slow": betas[1]}
    with pytest.raises(ModelRefused, match="0 < beta_slow <= beta_fast"):
        facts_from_config({**LLAMA, "rope_scaling": rope})


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"factor": 1e308, "original_max_position_embeddings": 4096}, "max_context"),
        ({"factor": 4.0, "original_max_position_embeddings": 10**400}, "max_context"),
        # 0.1 · mscale · ln(factor) + 1 is 0, by which the other is divided.
        (
            {"factor": 8.07 / 7, "mscale": 1.0, "mscale_all_dim": -10 / math.log(8.07 / 7)},
            "attention.factor is nan",
        ),
        ({"factor": 2.0, "mscale": 1e308, "mscale_all_dim": 1e-308}, "attention factor is 6"),
        ({"factor": 2.0, "attention_factor": -1.0}, "attention factor is -1"),
    ],
)
def test_yarn_beyond_all_numbers_is_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefused, match=named):
        facts_from_config({**LLAMA, "rope_scaling": {"rope_type": "yarn", **rope}})


def test_a_number_with_endless_digits_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": ' + "9" * 5000 + "}")
    with pytest.raises(ModelRefused, match="not readable as JSON"):
        read_json(file)


def test_a_refusal_quotes_a_little_of_what_it_found() -> None:
    with pytest.raises(ModelRefused) as refusal:
        facts_from_config({**LLAMA, "architectures": ["x" * 100_000]})
    assert len(str(refusal.value)) < 1000
    assert "supported" in str(refusal.value)


# --- GGUF -------------------------------------------------------------------------------------------------


def refused_gguf(folder: Path, name: str, **entries: Any) -> str:
    """What is said of a GGUF seed with other metadata."""
    model = seed(name).parts["m.gguf"]
    file = folder / "m.gguf"
    file.write_bytes(serialised(GGUFModel({**model.entries, **entries}, model.tensors)))
    with pytest.raises(ModelRefused) as refusal:
        open_model(str(file)).tokenizer()
    return str(refusal.value)


@pytest.mark.parametrize("value", [["x"], [math.nan], [2.5]])
@pytest.mark.parametrize("key", ["llama.attention.head_count", "llama.feed_forward_length"])
def test_counts_by_layer_are_integers(tmp_path: Path, key: str, value: list[Any]) -> None:
    assert f"{key} holds" in refused_gguf(tmp_path, "gguf-bytes", **{key: value})


@pytest.mark.parametrize("key", ["tokenizer.ggml.pre", "tokenizer.ggml.model"])
def test_a_list_in_place_of_a_name_is_refused(tmp_path: Path, key: str) -> None:
    said = refused_gguf(tmp_path, "gguf-bytes", **{key: ["a", "b"]})
    assert f"{key} is an array, expected a text" in said


def test_scores_are_numbers(tmp_path: Path) -> None:
    count = len(seed("gguf-sentencepiece").parts["m.gguf"].entries["tokenizer.ggml.tokens"])
    scores = {"tokenizer.ggml.scores": ["x"] * count}
    assert "a score for each token" in refused_gguf(tmp_path, "gguf-sentencepiece", **scores)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """They could call for many times the file's size in memory."""
    pieces = seed("gguf-bytes").parts["m.gguf"].pieces()
    offsets = [
        i
        for i, piece in enumerate(pieces)
        if piece.role == "u64" and pieces[i - 1].role == "u32" and pieces[i - 2].role == "u64"
    ]
    tensors = [i for i in offsets if int.from_bytes(pieces[i].content, "little") % 32 == 0][-3:]
    pieces[tensors[-1]] = Piece("u64", pieces[tensors[0]].content)
    file = tmp_path / "m.gguf"
    file.write_bytes(serialised(pieces))
    with pytest.raises(ModelRefused, match="overlap: corrupt"):
        open_model(str(file))


def test_a_token_that_only_looks_like_a_byte_is_text(tmp_path: Path) -> None:
    model = seed("gguf-sentencepiece").parts["m.gguf"]
    tokens = list(model.entries["tokenizer.ggml.tokens"])
    tokens[3 + 0x80] = "<0x8G>"
    file = tmp_path / "m.gguf"
    file.write_bytes(serialised(GGUFModel({**model.entries, "tokenizer.ggml.tokens": tokens}, model.tensors)))
    assert open_model(str(file)).tokenizer().decode([3 + 0x80, 3 + 0x41]) == "<0x8G>A"


def test_one_very_long_token_does_not_take_forever(tmp_path: Path) -> None:
    model = seed("gguf-sentencepiece").parts["m.gguf"]
    tokens = list(model.entries["tokenizer.ggml.tokens"])
    tokens[-1] = "x" * (1 << 20)
    file = tmp_path / "m.gguf"
    file.write_bytes(serialised(GGUFModel({**model.entries, "tokenizer.ggml.tokens": tokens}, model.tensors)))
    # A cut at every place would copy 10¹² characters.
    assert open_model(str(file)).tokenizer().encode("hello")


# --- tokenizer.json ---------------------------------------------------------------------------------------


def tokenizer_folder(folder: Path, **changes: Any) -> Path:
    parts = seed("folder").parts
    path = Seed("changed", "", {**parts, "tokenizer.json": {**parts["tokenizer.json"], **changes}}).write(
        folder
    )
    (path / "tokenizer_config.json").write_text("{}")
    return path


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}


@pytest.mark.parametrize(
    ("normalizer", "named"),
    [
        # The library would ask for 8 GiB, and end the process when there are none.
        (
            {"type": "Precompiled", "precompiled_charsmap": "AAAA/////w=="},
            "counts 4278190080 bytes and has 7",
        ),
        ({"type": "Precompiled", "precompiled_charsmap": "?"}, "not base64"),
        ({"type": "Sequence", "normalizers": [LONGER] * 5}, "1e\\+10 times as long"),
        ({"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 100}, "100 times as long"),
    ],
)
def test_normalizers_that_take_all_memory_are_refused(
    tmp_path: Path, normalizer: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelRefused, match=named):
        open_model(str(tokenizer_folder(tmp_path, normalizer=normalizer))).tokenizer()


def test_a_panic_of_the_library_is_a_bad_request(tmp_path: Path) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = open_model(str(tokenizer_folder(tmp_path, pre_tokenizer=pattern))).tokenizer()
    with pytest.raises(BadRequest, match=r"can't encode the text: .*retry-limit"):
        tokenizer.encode("a" * 3000 + "b")
    assert tokenizer.encode("b")


def test_a_vocabulary_that_lacks_characters_is_a_bad_request(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "unk_token": "missing", "vocab": {"a": 0}}
    tokenizer = open_model(str(tokenizer_folder(tmp_path, model=model, pre_tokenizer=None))).tokenizer()
    with pytest.raises(BadRequest, match="can't encode the text"):
        tokenizer.encode("b")


@pytest.mark.parametrize(
    "content", [b"[]", b"null", b"\xff", b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_tokenizer_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = tokenizer_folder(tmp_path)
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
        open_model(str(folder)).tokenizer()


# --- chat templates ---------------------------------------------------------------------------------------


def again(start: str, body: str, after: str = "{{ n.s }}") -> str:
    """A template that does something to `n.s` 99 times."""
    return f"{{% set n = namespace(s={start}) %}}{{% for i in range(99) %}}{body}{{% endfor %}}{after}"


@pytest.mark.parametrize(
    "source",
    [
        # Loops without an end
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [1] recursive %}{% for k in range(99) %}{{ loop([i]) }}{% endfor %}{% endfor %}",
        # Texts that double
        again("'x'", "{% set n.s = n.s ~ n.s %}"),
        again("'x'", "{% set n.s = n.s + n.s %}"),
        again("[0]", "{% set n.s = n.s + n.s %}"),
        again("9", "{% set n.s = n.s * n.s %}"),
        again("'x'", "{% set n.s = n.s | replace('x', 'xx') %}"),
        again("'x'", "{% set n.s = n.s.replace('x', 'xx') %}"),
        again("'x'", "{% set n.s = [n.s, n.s] | join %}"),
        again("'x'", "{% set n.s = ''.join([n.s, n.s]) %}"),
        again("'x'", "{% set n.s = '%s%s' % (n.s, n.s) %}"),
        again("'x'", "{% set n.s = '{}{}'.format(n.s, n.s) %}"),
        again("'x'", "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"),
        again("['x']", "{% set n.s = [n.s, n.s] %}"),
        again("['x']", "{% set n.s = [n.s, n.s] %}", "{{ n.s | tojson }}"),
        again("['x']", "{% set n.s = [n.s, n.s] %}", "{{ 'x' ~ n.s }}"),
        again("['x']", "{% set n.s = [n.s, n.s] %}", "{{ '%s' % n.s }}"),
        again("['x']", "{% set n.s = [n.s] * 2 %}"),
        again("['x']", "{% set n.s = (n.s, n.s) %}", "{{ {n.s: 1} }}"),
        again("{'x': 1}", "{% set n.s = dict(a=n.s, b=n.s) %}", "{{ n.s == messages }}"),
        again("{'x': 1}", "{% set n.s = {'a': n.s, 'b': n.s} %}", ""),
        # Much at once
        "{{ ([[0] * 9999] * 9999) | sum(start=[]) }}",
        "{{ 'x' * 999999999 }}",
        "{{ 999999999 * messages }}",
        "{{ 10 ** 99999999 }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x'.center(999999999) }}",
        "{{ 'x'.zfill(999999999) }}",
        "{{ ('\t' * 9999).expandtabs(9999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=999999999) }}",
        "{{ '{x:{w}}'.format_map({'x': 1, 'w': 999999999}) }}",
        "{{ 'x' | indent(999999999) }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ messages | batch(999999999, 'x') | list }}",
        "{{ range(99999) | join('x' * 99999) }}",
        "{{ ('x' * 99999).join(['y'] * 99999) }}",
        "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
        "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
        "{{ lipsum(n=999999999) }}",
        "{{ messages | pprint }}",
        # More than Python compiles
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 120 + "{% endif %}" * 120,
        "{{ " + "-" * 3000 + "1 }}",
    ],
)
def test_templates_that_would_use_up_the_machine_are_refused(source: str) -> None:
    with pytest.raises(BadRequest, match=r"the chat template (refused|failed)") as refusal:
        ChatTemplate(source, special_tokens={}).render(USER)
    assert len(str(refusal.value)) < 500


def test_a_long_conversation_is_far_from_the_limits() -> None:
    source = seed("folder").parts["chat_template.jinja"].decode()
    messages = [{"role": "user", "content": "word " * 200}] * 4000
    text = ChatTemplate(source, special_tokens={}).render(messages)
    assert text.count("<|im_start|>user") == 4000
    messages = [{"role": "user", "content": "word " * 800_000}]
    assert len(ChatTemplate(source, special_tokens={}).render(messages)) > 3_900_000


def test_counters_leave_what_templates_say_alone() -> None:
    source = (
        "{% macro f(a) %}<{{ a ~ 1 ~ none }}>{% endmacro %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.index ~ '/' ~ loop.length }}"
        "{% if loop.last %}!{% endif %}"
        "{{ f(m.content | upper | center(6)) }}{% else %}none{% endfor %}"
        "{% set ns = namespace(t='') %}{% for c in 'ab' %}{% set ns.t = c ~ ns.t %}{% endfor %}{{ ns.t }}"
        "{{ [1, 'é'] | tojson }}{{ '%03d' % 7 }}{{ '{:>3}'.format(8) }}{{ ['a', 'b'] | join(', ') }}"
        "{{ (1, [2], {'k': 3}) }}{{ [1, 2, 3] | sum }}{{ [[1]] | sum(start=[]) }}{% set a, b = 1, 2 %}{{ a }}"
        "{% for k, v in {'x': 'y'}.items() %}{{ k ~ v }}{% endfor %}{{ 'u' in ['u', 'v'] }}"
    )
    expected = """1/1!<  HI  1None>ba[1, "é"]007  8a, b(1, [2], {'k': 3})6[1]1xyTrue"""
    assert ChatTemplate(source, special_tokens={}).render(USER) == expected


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelRefused, match=r"chat_template\.jinja: not readable as text"):
        template_from_folder(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        template_from_file(tmp_path / "chat_template.jinja", {})


def test_a_template_beyond_any_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text("x" * (MAX_TEMPLATE_CHARS + 1))
    with pytest.raises(ModelRefused, match="characters"):
        template_from_folder(tmp_path)
    with pytest.raises(ConfigError, match="characters"):
        template_from_file(file, {})
    config = {
        "chat_template": [{"name": "default", "template": "x"}, {"name": "rag", "template": "x" * 999_999}]
    }
    file.unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="characters"):
        template_from_folder(tmp_path)


def test_an_operator_s_template_that_python_can_t_compile_is_refused_at_start(tmp_path: Path) -> None:
    file = tmp_path / "deep.jinja"
    file.write_text("{% for a in b %}" * 30 + "{% endfor %}" * 30)
    with pytest.raises(ConfigError, match="not a valid template"):
        template_from_file(file, {})
