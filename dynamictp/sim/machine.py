"""From a scenario's names to the facts that a pool needs: model, devices, memory and links by the advisor."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from dynamictp.advisor import local
from dynamictp.advisor.catalogue import open_shape
from dynamictp.advisor.devices import find_device
from dynamictp.advisor.machine import Machine, build_machine, default_nodes
from dynamictp.advisor.placement import place_replicas
from dynamictp.advisor.search import Evaluation, Question
from dynamictp.advisor.workloads import find_workload
from dynamictp.control.facts import PoolFacts
from dynamictp.cost.batching import Targets
from dynamictp.cost.calibration import Calibration
from dynamictp.cost.figures import Corner
from dynamictp.cost.hardware import Assumptions, EngineLimits
from dynamictp.cost.shape import ModelShape
from dynamictp.errors import ConfigError
from dynamictp.layout import LayoutSpec, planned_specs
from dynamictp.sim.pool import Setup
from dynamictp.sim.scenario import Configuration, Scenario


class Hardware(msgspec.Struct, frozen=True):
    """What all configurations of a scenario share."""

    shape: ModelShape
    machine: Machine
    limits: EngineLimits
    assumptions: Assumptions
    calibration: Calibration | None = None


@lru_cache(maxsize=8)
def hardware(model: str, device: str, devices: int, calibration: str) -> Hardware:
    """Looked up, read, or for `local` measured. Raises `ConfigError` or `ModelRefused`."""
    measured = Calibration.load(Path(calibration)) if calibration else None
    shape = open_shape(model)
    if device == "local":
        machine, limits = local.local_machine(
            devices, None if measured is None else local.measured_by(measured)
        )
        return Hardware(shape, machine, limits, local.ASSUMPTIONS, measured)
    facts = find_device(device)
    machine = build_machine(facts, default_nodes(facts, devices))
    return Hardware(shape, machine, EngineLimits(), Assumptions(), measured)


def setup_of(scenario: Scenario, configuration: Configuration, seed: int) -> Setup:
    """The pool of one configuration. Raises `ConfigError` when the model does not fit it."""
    found = hardware(scenario.model, scenario.device, scenario.devices, scenario.calibration)
    degrees = degrees_of(configuration)
    facts = _facts(scenario, configuration, found, degrees)
    legal = tuple(map(str, planned_specs(degrees, scenario.devices)))
    layout = str(LayoutSpec.parse(configuration.layout))
    return Setup(
        facts=facts,
        devices=scenario.devices,
        legal=legal if layout in legal else (layout, *legal),
        layout=layout,
        config=scenario.control(configuration),
        mode=configuration.mode,
        times=scenario.switch,
        noise=scenario.noise,
        seed=seed,
        max_wait_s=scenario.max_wait_s,
    )


def capacities_of(scenario: Scenario, configuration: Configuration) -> dict[int, float]:
    """By degree: requests per second that one domain carries within the SLO, by the cost model."""
    found = hardware(scenario.model, scenario.device, scenario.devices, scenario.calibration)
    degrees = degrees_of(configuration)
    targets = Targets(scenario.slo.ttft_p99_s, scenario.slo.tpot_target_s)
    question = msgspec.structs.replace(_question(scenario, configuration, found, degrees), targets=targets)
    return {
        tp: Evaluation(question, tp, 1).model(Corner.EXPECTED, 1).slo_capacity(1, targets) for tp in degrees
    }


def degrees_of(configuration: Configuration) -> tuple[int, ...]:
    """Degrees whose weights are resident."""
    layout = LayoutSpec.parse(configuration.layout)
    return configuration.degrees or tuple(sorted({shape.tp for shape in layout.shapes}))


def _question(
    scenario: Scenario, configuration: Configuration, found: Hardware, degrees: tuple[int, ...]
) -> Question:
    """What the advisor is asked about memory and capacity of the configuration."""
    limits = _limits(scenario, found.limits)
    if configuration.memory_mode != "static" and scenario.devices > 1:
        limits = limits.for_switching()
    return Question(
        shape=found.shape,
        machine=found.machine,
        workload=find_workload(scenario.mix, scenario.scale).capped(found.shape.max_context),
        context=scenario.longest_tokens,
        limits=limits,
        resident=degrees if len(degrees) > 1 else (),
        assumptions=found.assumptions,
        calibration=found.calibration,
    )


def _facts(
    scenario: Scenario, configuration: Configuration, found: Hardware, degrees: tuple[int, ...]
) -> PoolFacts:
    question = _question(scenario, configuration, found, degrees)
    kv_tokens, links = float("inf"), []
    for tp in degrees:
        plan = Evaluation(question, tp, 1)
        if plan.verdict is not None:
            raise ConfigError(
                f"configurations: {configuration.label}: {found.shape.name} at tp{tp} on {found.machine}: "
                f"{plan.verdict}: {plan.reason}"
            )
        kv_tokens = min(kv_tokens, plan.memory.kv_tokens / tp)
        link = place_replicas(found.machine, tp, 1)[0].link
        if link is not None:
            links.append((tp, link))
    return PoolFacts(
        shape=found.shape,
        device=found.machine.device,
        limits=question.limits,
        kv_tokens_per_device=kv_tokens,
        links=tuple(links),
        assumptions=found.assumptions,
        calibration=found.calibration,
    )


def _limits(scenario: Scenario, limits: EngineLimits) -> EngineLimits:
    """Those of the device's kind, with what the scenario says."""
    own = scenario.engine
    given = {
        "max_batched_tokens": own.max_batched_tokens,
        "max_num_seqs": own.max_num_seqs,
        "max_step_s": None if own.max_step_ms is None else own.max_step_ms * 1e-3,
        "page_tokens": own.page_tokens,
        "steps_ahead": own.steps_ahead,
    }
    return msgspec.structs.replace(limits, **{k: v for k, v in given.items() if v is not None})
