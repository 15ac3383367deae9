"""Facts for the planner from the advisor's machine."""

from __future__ import annotations

from dynamictp.advisor.local import ASSUMPTIONS, Measured, local_machine
from dynamictp.advisor.pool import pool_facts
from dynamictp.control.capacity import CostBook
from dynamictp.control.config import Slo
from dynamictp.control.traffic import Profile
from dynamictp.cost.shape import ModelShape

SHAPE = ModelShape("135m", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)


def test_a_cpu_node_has_capacities_for_all_layouts() -> None:
    machine, limits = local_machine(2, Measured(30e9, 36e9, 235e9, "fixed for the test"))
    facts = pool_facts(
        SHAPE, machine, degrees=(1, 2), limits=limits, assumptions=ASSUMPTIONS, kv_tokens_per_device=40_000
    )
    assert [degree for degree, _ in facts.links] == [2]
    assert facts.link(1) is None
    table = CostBook(facts).table(Profile(100, 180, 60, 110), (), Slo(), ("tp1", "tp2", "tp1+tp1"))
    assert 0 < table.capacity("tp1") < table.capacity("tp2")
    assert table.predict("tp2", 1.0).e2e_s < table.predict("tp1+tp1", 1.0).e2e_s
