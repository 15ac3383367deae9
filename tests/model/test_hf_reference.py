"""The forward pass against transformers in fp32 on the same weights, teacher-forced.

One run of each reference; every degree of ours must equal degree 1 bit by bit, and degree 1 must be close to
the reference: tightly in fp32, within the field's bf16 noise in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dynamictp import native
from dynamictp.facts import DType
from dynamictp.kernels.select import kernel_level
from dynamictp.messages import SamplingParams, TokenLogprobs
from dynamictp.model.load import open_model
from dynamictp.model.source import ModelSource
from dynamictp.model.weights import load_weights, plan_weights
from dynamictp.testing.harness import LockstepNode
from tests.harness.conversation import Request, make_blocks, random_prompt, run
from tests.model.checkpoints import VARIANTS, make_variant

TOKENS = 520
PAGE = 64
DEGREES = (1, 2, 3, 4, 5, 7)

needs_native = pytest.mark.skipif(native.load() is None, reason="the native extension is not installed")


class Bounds(NamedTuple):
    """Largest mean and maximum of |Δ log p|, and how far below the reference's best our choice may be."""

    mean: float
    most: float
    gap: float


BOUNDS: dict[DType, Bounds] = {"bf16": Bounds(0.06, 0.6, 0.3), "fp32": Bounds(1e-4, 2e-3, 0.01)}


class Reference(NamedTuple):
    """A model, a text, and what transformers says of the text: log-probabilities fp64 [tokens − 1, V]."""

    source: ModelSource
    tokens: list[int]
    logprobs: torch.Tensor


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    import transformers

    folder = make_variant(request.param, tmp_path_factory.mktemp(request.param))
    source = open_model(str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = random_prompt(7, TOKENS, source.facts.vocab)
    return Reference(source, tokens, reference_logprobs(model, tokens))


@pytest.fixture(scope="module")
def demo() -> Reference:
    source = open_model("demo")
    licence = Path(__file__).parents[2] / "LICENSE"
    tokens = source.tokenizer().encode(licence.read_text()[:4000], add_special_tokens=True)[:TOKENS]
    return Reference(source, tokens, reference_logprobs(llama_of(source), tokens))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_random_models_agree_with_transformers(checkpoint: Reference, dtype: DType) -> None:
    compare(checkpoint, dtype, DEGREES)


@pytest.mark.parametrize(("dtype", "degrees"), [("bf16", DEGREES), ("fp32", (1, 3))])
def test_the_embedded_model_agrees_with_transformers(
    demo: Reference, dtype: DType, degrees: tuple[int, ...]
) -> None:
    compare(demo, dtype, degrees)


@needs_native
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_native_kernels_agree_with_transformers(checkpoint: Reference, dtype: DType) -> None:
    compare(checkpoint, dtype, DEGREES, kernel_level())


@needs_native
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_native_kernels_run_the_embedded_model(demo: Reference, dtype: DType) -> None:
    compare(demo, dtype, (1, 2), kernel_level())


def compare(reference: Reference, dtype: DType, degrees: Sequence[int], kernel_level: str = "") -> None:
    index = plan_weights(reference.source.facts, dtype)
    buffer = np.zeros(index.total_bytes, np.uint8)
    load_weights(reference.source, index, buffer)
    with LockstepNode(
        reference.source.facts,
        devices=max(degrees),
        dtype=dtype,
        blocks=TOKENS // PAGE + 1,
        page_tokens=PAGE,
        max_tokens=260,
        weights=(index, buffer),
        kernel_level=kernel_level,
    ) as node:
        found = {degree: teacher_forced(node, degree, reference.tokens) for degree in degrees}
    for degree in degrees:
        assert found[degree] == found[1], f"tp{degree} differs from tp1"
    check(reference, found[1], BOUNDS[dtype])


def teacher_forced(node: LockstepNode, tp: int, tokens: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of all tokens but the first, and the most likely one at each place."""
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0, prompt_logprobs=1)
    pages = np.arange(node.arena.numel() // node.spec.page_bytes)
    blocks = make_blocks(node.spec.blocks(len(tokens) + 1), node.facts.kv_heads, pages)
    request = Request(0, tokens, sampling, blocks)
    domain = node.open(tp)
    run(domain, [request], 1, chunk=260, budget=260)
    domain.close()
    return request.prompt_logprobs


def check(reference: Reference, found: list[TokenLogprobs], bounds: Bounds) -> None:
    expected = reference.logprobs
    assert len(found) == len(expected) == len(reference.tokens) - 1
    own = expected.gather(1, torch.tensor(reference.tokens[1:])[:, None])[:, 0]
    delta = (torch.tensor([entry.logprob for entry in found], dtype=torch.float64) - own).abs()
    assert delta.mean() <= bounds.mean
    assert delta.max() <= bounds.most
    # Every place counts: where the reference leaves no near-tie, this is equality of the choices.
    chosen = expected.gather(1, torch.tensor([entry.top[0][0] for entry in found])[:, None])[:, 0]
    assert (expected.max(1).values - chosen).max() < bounds.gap


def reference_logprobs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([tokens])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def llama_of(source: ModelSource) -> torch.nn.Module:
    """transformers' Llama with the dequantised tensors of a source."""
    import transformers

    facts = source.facts
    config = transformers.LlamaConfig(
        vocab_size=facts.vocab,
        hidden_size=facts.hidden,
        intermediate_size=facts.intermediate,
        num_hidden_layers=facts.layers,
        num_attention_heads=facts.query_heads,
        num_key_value_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        max_position_embeddings=facts.max_context,
        rms_norm_eps=facts.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": facts.rope.theta},
        tie_word_embeddings=facts.tied_head,
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(dict(_state(source)), strict=False)
    model.tie_weights()
    return model


def _state(source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    for name in source.names:
        yield name, torch.from_numpy(np.array(source.tensor(name), np.float32))
