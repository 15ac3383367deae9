"""A worker's answers: opening, proving, breaking and closing domains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dynamictp import native
from dynamictp.errors import DomainError, ModelRefused, ProtocolError
from dynamictp.facts import WeightType
from dynamictp.kernels import native as kernels
from dynamictp.messages import (
    NO_TOKEN,
    CloseDomain,
    CommHandle,
    DomainBroken,
    DomainClosed,
    DomainOpened,
    DomainProven,
    OpenDomain,
    ProveDomain,
    RowStep,
    Shutdown,
    StepPlan,
    StepResult,
)
from dynamictp.model.views import ModelViews, build_views, check_exact
from dynamictp.model.weights import view_weight
from dynamictp.ranges import shard_ranges
from dynamictp.testing.harness import TINY, LockstepNode, random_weights
from dynamictp.worker import core, domain
from tests.harness.conversation import Request, make_blocks, random_prompt, run


@pytest.fixture
def node() -> Iterator[LockstepNode]:
    with LockstepNode(devices=5) as made:
        yield made


def request_on(node: LockstepNode, row: int = 0, length: int = 20) -> Request:
    pages = np.arange(9 * row, 192)
    return Request(row, random_prompt(row, length, node.facts.vocab), blocks=make_blocks(3, 3, pages))


def first_plan(node: LockstepNode, epoch: int, step: int = 1) -> StepPlan:
    request = request_on(node)
    return StepPlan(epoch, step, (RowStep(0, 0, 20, True),), (request.as_new(),))


def test_no_degree_copies_weights(node: LockstepNode) -> None:
    for tp in range(1, 6):
        opened = node.open(tp).opened
        assert all(isinstance(answer, DomainOpened) for answer in opened)
        assert [answer.weight_bytes_copied for answer in opened] == [0] * tp  # type: ignore[union-attr]


def test_a_deliberate_copy_is_caught(node: LockstepNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def copying(*arguments: Any) -> ModelViews:
        made = build_views(*arguments)
        gate = made.layers[1].gate
        object.__setattr__(gate, "weight", gate.weight.clone())
        return made

    monkeypatch.setattr(core, "build_views", copying)
    (opened,) = node.open(1).opened
    assert isinstance(opened, DomainOpened)
    assert opened.weight_bytes_copied == 288 * 144 * 4


@pytest.mark.skipif(native.load() is None, reason="no native extension")
@pytest.mark.parametrize(("quantised", "threads"), [("", 1), ("", 2), ("int8", 1)])
def test_no_degree_copies_packed_weights(quantised: WeightType, threads: int) -> None:
    with LockstepNode(
        devices=5, dtype="bf16", kernel_level="portable", quantised=quantised, threads=threads
    ) as node:
        for tp in (1, 2, 3, 5):
            opened = node.open(tp).opened
            assert [answer.weight_bytes_copied for answer in opened] == [0] * tp  # type: ignore[union-attr]


@pytest.mark.skipif(native.load() is None, reason="no native extension")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_deliberate_copy_of_packed_weights_is_caught(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def copying(model: kernels.NativeModel) -> dict[str, int]:
        found = addresses(model)
        entry = model.index.entries["layers.1.gate"]
        copies.append(model.weights[entry.offset : entry.offset + 288 * 144 * 2].copy())
        return found | {"layers.1.gate": copies[-1].ctypes.data}

    addresses = kernels.weight_addresses
    monkeypatch.setattr(kernels, "weight_addresses", copying)
    with LockstepNode(devices=2, dtype="bf16", kernel_level="portable", threads=threads) as node:
        (opened,) = node.open(1).opened
        assert isinstance(opened, DomainOpened)
        assert opened.weight_bytes_copied == 288 * 144 * 2
        # Of two ranks each reads its half.
        halves = [answer.weight_bytes_copied for answer in node.open(2).opened]  # type: ignore[union-attr]
        assert sum(halves) == 288 * 144 * 2
        assert all(halves)


def test_the_ranks_cover_every_row_once(node: LockstepNode) -> None:
    mapping = torch.from_numpy(node.weights)
    for tp in (1, 4, 9):
        made = [
            build_views(mapping, node.index, node.facts, shard_ranges(node.facts, tp, rank))
            for rank in range(tp)
        ]
        for name in ("qkv", "o", "gate", "up", "down"):
            parts = [getattr(v.layers[1], name) for v in made]
            whole = torch.cat([part.weight[: len(part.rows)] for part in parts])
            stored = view_weight(node.index, node.weights, f"layers.1.{name}")
            assert torch.equal(whole, torch.from_numpy(stored[: len(whole)])), name
            assert len(whole) == node.index.entries[f"layers.1.{name}"].shape[0]


def test_proving_touches_no_page(node: LockstepNode) -> None:
    node.arena.random_()
    before = node.arena.clone()
    node.open(3)
    assert torch.equal(node.arena, before)


def test_only_rank_0_answers(node: LockstepNode) -> None:
    found = node.open(3)
    assert [type(answer) for answer in found.send(*(ProveDomain(found.epoch, 1),) * 3)] == [DomainProven]
    (result,) = found.send(*(first_plan(node, found.epoch),) * 3)
    assert isinstance(result, StepResult)
    assert 0 <= result.wait_s < result.seconds
    assert len(found.send(*(CloseDomain(found.epoch),) * 3)) == 3


def test_an_empty_plan_is_answered(node: LockstepNode) -> None:
    assert node.open(2).step().tokens == ()


def test_an_error_in_a_step_breaks_the_domain(node: LockstepNode, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = node.open(3, (4, 2, 0))
    victim = node.workers[2]._domains[broken.epoch][1]
    assert victim is not None

    def fail(*_: object) -> torch.Tensor:
        raise ArithmeticError("a rank's own fault")

    monkeypatch.setattr(victim._computation, "logits", fail)
    answers = node.handle(dict.fromkeys(broken.members, first_plan(node, broken.epoch)))
    found = {device: answer[0] for device, answer in answers.items()}
    assert all(isinstance(answer, DomainBroken) for answer in found.values())
    assert {device: answer.culprit for device, answer in found.items()} == {4: False, 2: True, 0: False}  # type: ignore[union-attr]
    assert found[2].error == "ArithmeticError: a rank's own fault"  # type: ignore[union-attr]
    later = node.handle(dict.fromkeys(broken.members, first_plan(node, broken.epoch, 2)))
    assert later == {4: [], 2: [], 0: []}
    closed = node.handle(dict.fromkeys(broken.members, CloseDomain(broken.epoch)))
    assert [type(answer[0]) for answer in closed.values()] == [DomainClosed] * 3
    run(node.open(3, (4, 2, 0)), [request_on(node)], 2)


def test_a_plan_that_does_not_fit_breaks_every_rank(node: LockstepNode) -> None:
    with pytest.raises(DomainError, match="row 5, which does not exist"):
        node.open(2).step([RowStep(5, 0, 1, True)])


def test_a_step_larger_than_the_exchange_is_refused(node: LockstepNode) -> None:
    request = request_on(node, length=65)
    request.blocks = make_blocks(5, 3, np.arange(15))
    with pytest.raises(DomainError, match="65 tokens; the exchange holds 64"):
        node.open(1).step([RowStep(0, 0, 65, True)], [request.as_new()])


def test_undefined_logits_give_no_token_and_break_nothing() -> None:
    index, buffer = random_weights(TINY, 0, "fp32")
    view_weight(index, buffer, "head")[100, 3] = np.nan
    with LockstepNode(devices=2, weights=(index, buffer)) as node:
        domain, request = node.open(2), request_on(node)
        step = RowStep(request.row, 0, len(request.prompt), True)
        (token,) = domain.step([step], [request.as_new()]).tokens
        assert token.token == NO_TOKEN
        assert token.logprobs is None
        # The step after it may be under way already.
        assert domain.step([RowStep(request.row, len(request.prompt), 1, True)]).tokens[0].token == NO_TOKEN


def test_a_wrong_proof_is_noticed(node: LockstepNode, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = domain._pattern
    calls = iter(range(9))
    monkeypatch.setattr(domain, "_pattern", lambda epoch, rank: honest(epoch, next(calls)))
    with pytest.raises(DomainError, match="rank 0 sent other bytes"):
        node.open(1)


def test_a_parked_communicator_is_used_again(node: LockstepNode) -> None:
    handle = CommHandle(90, 3)
    for epoch in (100, 101):
        for rank, device in enumerate((1, 3)):
            node.handle({device: OpenDomain(epoch, "", 2, rank, (1, 3), handle, control_slot=3)})
        proven = node.handle(dict.fromkeys((1, 3), ProveDomain(epoch, 0)))
        assert isinstance(proven[1][0], DomainProven)
        node.handle(dict.fromkeys((1, 3), CloseDomain(epoch)))
    assert node.workers[1]._comms._by_id.keys() == {90}
    node.handle({1: OpenDomain(102, "", 1, 0, (1,), CommHandle(91, 3), control_slot=3)})
    assert node.workers[1]._comms._by_id.keys() == {91}


def test_pipeline_stages_are_refused_by_name(node: LockstepNode) -> None:
    body = OpenDomain(9, "", 1, 0, (0,), CommHandle(9, 0), control_slot=0, pp=2)
    (answer,) = node.workers[0].handle(body)
    assert isinstance(answer, DomainBroken)
    assert "pipeline stages" in answer.error


def test_messages_that_no_worker_understands(node: LockstepNode) -> None:
    worker = node.workers[0]
    for body in (StepPlan(77, 1, ()), ProveDomain(77, 1), CloseDomain(77), Shutdown()):
        with pytest.raises(ProtocolError):
            worker.handle(body)


def test_models_that_exact_numerics_cannot_cut_are_refused() -> None:
    for changes, message in (({"head_dim": 24}, "head_dim is 24"), ({"hidden": 64}, "at least 80")):
        with pytest.raises(ModelRefused, match=message):
            check_exact(msgspec.structs.replace(TINY, **changes))
