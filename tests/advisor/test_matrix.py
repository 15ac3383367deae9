"""The deployment matrix agrees with the rules of thumb, or says why not."""

from __future__ import annotations

import pytest

from dynamictp.advisor.matrix import MACHINES, MODELS, Cell, cells, deviation, matrix_page


@pytest.fixture(scope="module")
def found() -> tuple[Cell, ...]:
    return cells()


def test_every_cell_is_there(found: tuple[Cell, ...]) -> None:
    assert len(found) == len(MODELS) * len(MACHINES) * 4


def test_small_models_on_nvlink_are_replicas(found: tuple[Cell, ...]) -> None:
    for cell in found:
        if cell.model in ("7B/8B", "14B") and cell.machine == "NVLink node":
            assert cell.winner is not None
            assert cell.winner.tp == 1, cell.workload


def test_pcie_machines_stay_at_tp4_or_below(found: tuple[Cell, ...]) -> None:
    for cell in found:
        if cell.machine == "PCIe node" and cell.winner is not None:
            assert cell.winner.tp <= 4


def test_70b_with_real_context_is_tp4_or_tp8_on_nvlink(found: tuple[Cell, ...]) -> None:
    for cell in found:
        if cell.model == "70B" and cell.machine == "NVLink node" and cell.workload != "qa":
            assert cell.winner is not None
            assert cell.winner.tp in (4, 8)


def test_nodes_are_joined_by_replicas_unless_a_node_is_too_small(found: tuple[Cell, ...]) -> None:
    for cell in found:
        if cell.machine == "Two NVLink nodes":
            assert cell.winner is not None
            assert cell.winner.pp == (2 if cell.model == "405B" else 1)


def test_every_deviation_is_explained_with_numbers(found: tuple[Cell, ...]) -> None:
    deviating = [cell for cell in found if cell.winner is not None and cell.winner != cell.narrowest]
    assert deviating, "32B with long prompts needs more KV than one device has"
    for cell in deviating:
        why = deviation(cell)
        assert cell.winner is not None
        assert cell.winner.name in why
        assert why.endswith("(rule 1)") == (cell.narrowest is not None and cell.narrowest.tp == 1)
        assert any(character.isdigit() for character in why)
    for cell in found:
        if cell.winner == cell.narrowest:
            assert deviation(cell) == ""


def test_the_page_has_every_model_and_machine(found: tuple[Cell, ...]) -> None:
    page = matrix_page(found=found)
    for name in (*MODELS.values(), "NVLink node", "PCIe node", "Two NVLink nodes"):
        assert name in page


def test_the_page_says_what_a_lost_node_takes(found: tuple[Cell, ...]) -> None:
    page = matrix_page(found=found)
    (line,) = [line for line in page.splitlines() if line.startswith("- rule 7: what a lost node takes")]
    assert "TP1 x 16 50% (7B/8B, 14B, 32B)" in line
    assert "TP8 PP2 x 1 100% (405B)" in line
