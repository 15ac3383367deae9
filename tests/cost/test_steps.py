"""Step times against examples worked by hand from data sheets."""

from __future__ import annotations

import msgspec
import pytest

from dynamictp.cost.calibration import Calibration, CalibrationPoint, RequestPoint
from dynamictp.cost.collectives import all_reduce_s
from dynamictp.cost.figures import Corner, Figure
from dynamictp.cost.hardware import Assumptions, DeviceFacts, LinkFacts
from dynamictp.cost.shape import Experts, ModelShape
from dynamictp.cost.steps import Domain, StepModel

LLAMA_13B = ModelShape("13b", 40, 5120, 40, 40, 128, 13824, 32000, 4096)
LLAMA_2_70B = ModelShape("70b", 80, 8192, 64, 8, 128, 28672, 32000, 4096)
A100_40G = DeviceFacts(
    "a100-40g", 40e9, Figure(1.555e12, "data sheet", "x"), Figure(312e12, "data sheet", "x")
)
A100_80G = DeviceFacts(
    "a100-80g", 80e9, Figure(2.039e12, "data sheet", "x"), Figure(312e12, "data sheet", "x")
)
NVLINK = LinkFacts("NV12", Figure(300e9, "data sheet", "x"), Figure(1.5e-6, "assumed", "x", ideal=0.0), True)


def ideal(domain: Domain) -> StepModel:
    return StepModel(domain, Corner.IDEAL)


def test_decode_of_a_13b_reads_its_weights() -> None:
    # kipply, "Transformer Inference Arithmetic": latency at batch 1 is parameters x 2 bytes / bandwidth.
    # 13.0 B without the embedding look-up: 12.85 B x 2 / 1.555 TB/s = 16.5 ms.
    found = ideal(Domain(LLAMA_13B, A100_40G, 1)).decode(1, 1e-9).total_s
    assert found == pytest.approx((13_015_864_320 - 32000 * 5120) * 2 / 1.555e12, rel=1e-3)
    assert found == pytest.approx(16.5e-3, rel=0.01)


def test_batches_are_free_up_to_peak_over_bandwidth() -> None:
    # The same text: 312 TFLOP/s / 1.5 TB/s = 208 tokens; here 2 FLOPs and 2 bytes a parameter, 201 tokens.
    steps = ideal(Domain(LLAMA_13B, A100_40G, 1))
    edge = 312e12 / 1.555e12
    assert steps.base(edge * 0.99, edge * 0.99).linear_s == pytest.approx(steps.base(1, 1).linear_s)
    assert steps.base(2 * edge, 2 * edge).linear_s == pytest.approx(2 * steps.base(1, 1).linear_s)


def test_decode_of_a_70b_at_tp8_and_its_cache() -> None:
    # (68.98 B - embedding) x 2 bytes / 8 / 2.039 TB/s = 8.4 ms; 16 sequences of 2,000 tokens read
    # 16 x 2,000 x 327,680 / 8 bytes = 0.64 ms more.
    steps = ideal(Domain(LLAMA_2_70B, A100_80G, 8, link=NVLINK))
    cost = steps.decode(16, 2000)
    assert cost.linear_s == pytest.approx((68_976_648_192 - 32000 * 8192) * 2 / 8 / 2.039e12, rel=1e-3)
    assert cost.attention_s == pytest.approx(16 * 2000 * 327_680 / 8 / 2.039e12)
    assert cost.overhead_s == 0


def test_prefill_is_flops_over_peak_and_utilisation() -> None:
    # A4: 2 x 68.7 B x 2,048 FLOPs / (8 x 312 TFLOP/s x 0.5) = 225 ms, the head for one token only.
    half = Assumptions(compute_efficiency=Figure(0.5, "assumed", "x"), overlap=Figure(1.0, "assumed", "x"))
    steps = StepModel(Domain(LLAMA_2_70B, A100_80G, 8, link=NVLINK, assumptions=half))
    cost = steps.prompt(2048, 2048)
    body = 68_976_648_192 - 2 * 32000 * 8192
    assert cost.linear_s == pytest.approx(2 * body * 2048 / (8 * 312e12 * 0.5), rel=2e-3)
    # Causal: half of 2,048^2 pairs, 4 x 64 x 128 FLOPs each in 80 layers.
    pairs = 2048 * 1024 * 4 * 64 * 128 * 80
    assert cost.attention_s == pytest.approx(pairs / (8 * 312e12 * 0.5), rel=1e-3)


def test_prefill_pays_two_collectives_a_layer() -> None:
    domain = Domain(LLAMA_2_70B, A100_80G, 8, link=NVLINK)
    one = all_reduce_s(2048 * 8192 * 2, 8, NVLINK, Assumptions(), Corner.EXPECTED)
    found = StepModel(domain).prompt(2048, 2048).communication_s
    assert found == pytest.approx(2 * 80 * one, rel=0.01)


def test_overlap_adds_what_is_not_hidden() -> None:
    def seconds(overlap: float) -> float:
        assumed = Assumptions(
            compute_efficiency=Figure(1.0, "assumed", "x"),
            memory_efficiency=Figure(1.0, "assumed", "x"),
            overlap=Figure(overlap, "assumed", "x"),
        )
        return StepModel(Domain(LLAMA_13B, A100_40G, 1, assumptions=assumed)).base(201, 201).linear_s

    assert seconds(0.0) == pytest.approx(2 * seconds(1.0), rel=0.01), "at the ridge both parts are equal"


def test_experts_touched_by_a_batch() -> None:
    # Mixtral, 2 of 8: one token reads a quarter of the experts, eight tokens 1 - 0.75^8 = 90 %.
    moe = ModelShape("mixtral", 32, 4096, 32, 8, 128, 14336, 32000, 32768, experts=Experts(8, 2, 14336))
    steps = ideal(Domain(moe, A100_80G, 1))
    rest = (moe.parts.attention + moe.vocab * moe.hidden + 32 * 8 * 4096) * 2 / 2.039e12
    experts = moe.parts.experts * 2 / 2.039e12
    assert steps.base(1, 1).linear_s == pytest.approx(rest + experts / 4, rel=1e-3)
    assert steps.base(8, 8).linear_s == pytest.approx(rest + experts * (1 - 0.75**8), rel=1e-3)


def test_attention_at_tp6_is_no_faster_than_at_tp4() -> None:
    def attention(tp: int) -> float:
        return ideal(Domain(LLAMA_2_70B, A100_80G, tp, link=NVLINK)).decode_attention_s(8, 1000)

    assert attention(6) == attention(5) == attention(4)
    assert attention(8) == pytest.approx(attention(4) / 2)


def test_stages_fill_the_pipeline_once() -> None:
    # Four chunks through two stages: (4 + 2 - 1) / (4 x 2) of the sum of the passes.
    domain = Domain(LLAMA_13B, A100_80G, 1, 2, stage_link=NVLINK)
    steps = ideal(domain)
    one_stage = ideal(Domain(LLAMA_13B, A100_80G, 1))
    assert steps.prompt(4096, 1024).linear_s == pytest.approx(one_stage.prompt(4096, 1024).linear_s * 5 / 8)


def test_cores_share_one_memory() -> None:
    core = DeviceFacts(
        "core", 4e9, Figure(28e9, "measured", "x"), Figure(2e12, "measured", "x"),
        shared_bandwidth=Figure(36e9, "measured", "x"), shared_memory=True, node_devices=2,
    )  # fmt: skip
    shape = ModelShape("smol", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)
    memory = LinkFacts("memory", Figure(36e9, "measured", "x"), Figure(1e-6, "measured", "x", ideal=0.0))
    alone = ideal(Domain(shape, core, 1)).base(1, 1).linear_s
    both = ideal(Domain(shape, core, 1, active_devices=2)).base(1, 1).linear_s
    together = ideal(Domain(shape, core, 2, link=memory)).base(1, 1).linear_s
    assert both == pytest.approx(alone * 28 / 18)
    assert together == pytest.approx(alone / (36 / 28), rel=0.02), "TP2 gains what the memory gains"


def test_an_exchange_through_memory_by_hand() -> None:
    # Design 4: five exchanges a layer, each a barrier of 1 us and a write and a read of a rank's half of
    # 64 tokens x 576 x 2 bytes: 73.7 KB over 36 GB/s = 2.05 us. 30 layers: 150 x 3.05 us = 457 us. Then half
    # of the logits of 4 rows, 4 x 49,152 x 2 / 2 = 197 KB = 5.5 us.
    core = DeviceFacts(
        "core", 4e9, Figure(28e9, "measured", "x"), Figure(2e12, "measured", "x"), shared_memory=True,
        node_devices=2,
    )  # fmt: skip
    shape = ModelShape("smol", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)
    memory = LinkFacts("memory", Figure(36e9, "measured", "x"), Figure(1e-6, "measured", "x"))
    found = ideal(Domain(shape, core, 2, link=memory)).communication_s(64, 4)
    assert found == pytest.approx(457e-6 + 5.5e-6, rel=2e-3)


def test_stages_send_their_activations_once() -> None:
    # Narayanan et al. 2021: tokens x hidden at each boundary, cut by TP: 1,024 x 5,120 x 2 bytes / 25 GB/s =
    # 419 us and 5 us of latency, over two boundaries.
    network = LinkFacts("network", Figure(25e9, "assumed", "x"), Figure(5e-6, "assumed", "x"))
    three = ideal(Domain(LLAMA_13B, A100_80G, 1, 3, stage_link=network))
    assert three.communication_s(1024, 1) == pytest.approx(2 * (419.4e-6 + 5e-6), rel=1e-3)
    cut = ideal(Domain(LLAMA_13B, A100_80G, 2, 3, link=NVLINK, stage_link=network))
    inside = ideal(Domain(LLAMA_13B, A100_80G, 2, link=NVLINK)).communication_s(1024, 1)
    assert cut.communication_s(1024, 1) - inside == pytest.approx(2 * (209.7e-6 + 5e-6), rel=1e-3)


def test_calibration_replaces_the_assumptions() -> None:
    points = (CalibrationPoint("base", 1, 1, 2.0), CalibrationPoint("base", 1, 64, 4.0))
    calibration = Calibration("13b", "a100", "test", points)
    domain = Domain(LLAMA_13B, A100_40G, 1)
    plain, corrected = StepModel(domain), StepModel(msgspec.structs.replace(domain, calibration=calibration))
    assert corrected.base(1, 1).total_s == pytest.approx(2 * plain.base(1, 1).total_s)
    assert corrected.base(8, 8).total_s == pytest.approx(2**1.5 * plain.base(8, 8).total_s), (
        "in the logarithm"
    )
    slow = StepModel(msgspec.structs.replace(domain, calibration=calibration), Corner.SLOW)
    assert slow.base(1, 1).total_s == pytest.approx(1.15 * corrected.base(1, 1).total_s)
    bound = StepModel(msgspec.structs.replace(domain, calibration=calibration), Corner.IDEAL)
    assert bound.base(1, 1) == StepModel(domain, Corner.IDEAL).base(1, 1), "physics is not corrected"


def test_a_request_outside_of_steps_is_assumed_until_it_is_measured() -> None:
    domain = Domain(LLAMA_13B, A100_40G, 1)
    assumed = Assumptions().request_overhead_s
    for corner, seconds in ((Corner.FAST, assumed.better), (Corner.EXPECTED, 5e-3), (Corner.IDEAL, 0.0)):
        steps = StepModel(domain, corner)
        assert steps.request_s(busy=False) == steps.request_s(busy=True) == seconds


def test_a_request_takes_longer_where_the_cores_compute() -> None:
    # 4 ms on an idle node, 12 ms beside two busy cores: 8 ms beside that of tp1, 12 beside tp1 + tp1.
    points = (RequestPoint(0, 4e-3, 3e-3, 6e-3), RequestPoint(2, 12e-3, 9e-3, 20e-3))
    calibration = Calibration("13b", "core", "test", (), requests=points)
    alone = Domain(LLAMA_13B, A100_40G, 1, calibration=calibration)
    both = msgspec.structs.replace(alone, active_devices=2)
    pair = msgspec.structs.replace(alone, tp=2, link=NVLINK)
    assert StepModel(alone).request_s(busy=False) == pytest.approx(4e-3)
    assert StepModel(alone).request_s(busy=True) == pytest.approx(8e-3)
    assert (
        StepModel(both).request_s(busy=True) == StepModel(pair).request_s(busy=True) == pytest.approx(12e-3)
    )
    assert StepModel(pair, Corner.SLOW).request_s(busy=True) == pytest.approx(20e-3), "the upper quartile"
    assert StepModel(pair, Corner.IDEAL).request_s(busy=True) == 0


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="tp2 needs a link"):
        StepModel(Domain(LLAMA_13B, A100_40G, 2))
    with pytest.raises(ValueError, match="pp2 needs a link"):
        StepModel(Domain(LLAMA_13B, A100_40G, 1, 2))
