"""The worker without its process: messages in, messages out. Used by the process and by the harness."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from dynamictp.clock import Clock, SystemClock
from dynamictp.errors import CommunicatorBroken, ProtocolError
from dynamictp.kernels.native import NativeModel, open_team
from dynamictp.kv import KVSpec
from dynamictp.messages import (
    Body,
    CloseDomain,
    DomainBroken,
    DomainClosed,
    DomainOpened,
    DomainProven,
    OpenDomain,
    ProveDomain,
    StepPlan,
)
from dynamictp.model.exchange import open_exchange
from dynamictp.model.pages import KVArena
from dynamictp.model.rope import RopeTable
from dynamictp.model.views import ModelViews, build_views
from dynamictp.ranges import ShardRanges, shard_ranges
from dynamictp.worker.comm.base import Communicator
from dynamictp.worker.comm.control import ControlBlock, WorkerState
from dynamictp.worker.communicators import CommunicatorFactory, Communicators
from dynamictp.worker.computation import Computation, NativeComputation, TorchComputation
from dynamictp.worker.domain import Device, Domain
from dynamictp.worker.fault import BeforeStep, no_fault
from dynamictp.worker.start import WorkerStart

log = logging.getLogger(__name__)


class WorkerCore:
    """One device's domains and communicators. Used by one thread; executes messages in arrival order.

    `weights` (uint8, `start.index.total_bytes`) and `arena` (uint8) are shared mappings; `payload` gives the
    exchange payload (uint8, `exchange_bytes`) of a slot.
    """

    def __init__(
        self,
        start: WorkerStart,
        weights: torch.Tensor,
        arena: torch.Tensor,
        *,
        payload: Callable[[int], torch.Tensor],
        communicator: CommunicatorFactory,
        control: ControlBlock,
        clock: Clock | None = None,
        before_step: BeforeStep = no_fault,
    ) -> None:
        self._start = start
        self._before_step = before_step
        self._clock = clock or SystemClock()
        spec = KVSpec.of(start.facts, start.arena.page_tokens, start.arena.dtype)
        pages = start.arena.pages * spec.page_bytes
        rope = RopeTable(start.facts)
        self._device = Device(start, weights, KVArena(arena[:pages], spec), rope, self._clock)
        self._native: NativeModel | None = None
        if start.kernel_level:
            memory = (weights.numpy(), arena[:pages].numpy())
            team = open_team(start.threads, start.thread_cores, spin=start.spin)
            self._native = NativeModel(
                start.facts, start.index, *memory, spec, rope, start.kernel_level, team
            )
        self._payload = payload
        self._comms = Communicators(communicator)
        self._control = control
        self._domains: dict[int, tuple[OpenDomain, Domain | None]] = {}
        self._handled = 0
        """Messages of this engine that were begun: the progress word says which one is computed. The engine
        knows how many it sent, so a worker that owes nothing can be told from one that hangs."""
        self._publish(0, WorkerState.IDLE)

    def handle(self, body: Body) -> list[Body]:
        """Execute one message; the answers to the engine, in order. Only a message that no worker
        understands raises (`ProtocolError`): what goes wrong in a domain is answered with `DomainBroken`.
        """
        self._handled += 1
        self._publish(0, WorkerState.COMPUTING)
        try:
            match body:
                case StepPlan():
                    return self._on_plan(body)
                case OpenDomain():
                    return self._on_open(body)
                case ProveDomain():
                    return self._on_prove(body)
                case CloseDomain():
                    return self._on_close(body)
                case _:
                    raise ProtocolError(f"a worker does not understand {type(body).__name__}")
        finally:
            self._publish(self._start.facts.layers, WorkerState.IDLE)

    def reset(self) -> None:
        """Another engine takes over: drop all domains and close the communicators, and count anew."""
        self.close()
        self._handled = 0
        self._publish(0, WorkerState.IDLE)

    def close(self) -> None:
        """Drop all domains and close the communicators."""
        self._domains.clear()
        self._comms.close()

    # ------------------------------------------------------------ messages

    def _on_open(self, opened: OpenDomain) -> list[Body]:
        facts, began = self._start.facts, self._clock.now()
        self._domains[opened.epoch] = (opened, None)
        try:
            ranges = shard_ranges(facts, opened.tp, opened.rank)
            # The native path has no views: it computes addresses in the mapping.
            views = None if self._native is not None else self._build_views(opened, ranges=ranges)
            viewed = self._clock.now()
            comm = self._comms.open(opened)

            def open_computation(barrier: Callable[[], None], on_layer: Callable[[int], None]) -> Computation:
                if views is None:
                    return self._open_native(opened, comm)
                return self._open_torch(opened, views, barrier, on_layer)

            domain = Domain(
                self._device,
                opened,
                comm=comm,
                open_computation=open_computation,
                on_layer=lambda layer: self._publish(layer, WorkerState.COMPUTING),
            )
        except Exception as error:  # noqa: BLE001  (any failure must be answered, or the switch hangs)
            return [self._broken(opened, 0, error)]
        self._domains[opened.epoch] = (opened, domain)
        return [
            DomainOpened(
                opened.epoch,
                opened.rank,
                views_ms=(viewed - began) * 1e3,
                communicator_ms=(self._clock.now() - viewed) * 1e3,
                weight_bytes_copied=domain.weight_bytes_copied,
            )
        ]

    def _on_prove(self, body: ProveDomain) -> list[Body]:
        opened, domain = self._domains.get(body.epoch, (None, None))
        if opened is None or domain is None or domain.broken:
            return self._refuse(body.epoch, body.step, opened)
        try:
            proof_ms = domain.prove()
        except Exception as error:  # noqa: BLE001  (see _on_open)
            return self._break(opened, domain, body.step, error)
        return [DomainProven(body.epoch, domain.rank, proof_ms)] if domain.rank == 0 else []

    def _on_plan(self, plan: StepPlan) -> list[Body]:
        opened, domain = self._domains.get(plan.epoch, (None, None))
        if opened is None or domain is None or domain.broken:
            return self._refuse(plan.epoch, plan.step, opened)
        try:
            self._before_step(plan)
            result = domain.step(plan)
        except Exception as error:  # noqa: BLE001  (see _on_open)
            return self._break(opened, domain, plan.step, error)
        return [result] if domain.rank == 0 else []

    def _on_close(self, body: CloseDomain) -> list[Body]:
        opened, _ = self._domains.pop(body.epoch, (None, None))
        if opened is None:
            raise ProtocolError(f"epoch {body.epoch} is not open on device {self._start.device}")
        self._comms.park(opened)
        return [DomainClosed(body.epoch, opened.rank)]

    # ------------------------------------------------------------ parts

    def _build_views(self, opened: OpenDomain, ranges: ShardRanges) -> ModelViews:
        if opened.pp != 1:
            raise ProtocolError(f"epoch {opened.epoch} has {opened.pp} pipeline stages: not supported yet")
        return build_views(self._device.weights, self._start.index, self._start.facts, ranges)

    def _open_torch(
        self,
        opened: OpenDomain,
        views: ModelViews,
        barrier: Callable[[], None],
        on_layer: Callable[[int], None],
    ) -> Computation:
        start, device = self._start, self._device
        exchange = open_exchange(
            self._payload(opened.comm.slot),
            start.facts,
            start.dtype,
            max_tokens=start.max_tokens,
            max_rows=start.max_rows,
            barrier=barrier,
            on_layer=on_layer,
        )
        return TorchComputation(
            start.facts, opened, views, exchange, weights=device.weights, arena=device.arena, rope=device.rope
        )

    def _open_native(self, opened: OpenDomain, comm: Communicator) -> Computation:
        assert self._native is not None
        start, payload = self._start, self._payload(opened.comm.slot).numpy()
        limits = {"max_tokens": start.max_tokens, "max_rows": start.max_rows}
        progress = self._control.progress_address(start.device)
        return NativeComputation(self._native, opened, comm, payload=payload, progress=progress, **limits)

    def _break(self, opened: OpenDomain, domain: Domain, step: int, error: Exception) -> list[Body]:
        """Leave the domain: release the peers at once and refuse its further plans."""
        domain.broken = True
        domain.comm.abort()
        return [self._broken(opened, step, error)]

    def _broken(self, opened: OpenDomain, step: int, error: Exception) -> DomainBroken:
        culprit = not isinstance(error, CommunicatorBroken)
        log.error(
            "epoch %d rank %d left its domain in step %d: %s",
            opened.epoch,
            opened.rank,
            step,
            error,
            exc_info=culprit,
        )
        return DomainBroken(opened.epoch, opened.rank, step, culprit, f"{type(error).__name__}: {error}")

    def _refuse(self, epoch: int, step: int, opened: OpenDomain | None) -> list[Body]:
        """A broken domain was reported already; one that was never opened, or is closed, is an error."""
        if opened is not None:
            return []
        raise ProtocolError(f"step {step} of epoch {epoch}, which is not open on device {self._start.device}")

    def _publish(self, layer: int, state: WorkerState) -> None:
        self._control.set_progress(self._start.device, self._handled, layer, state)
