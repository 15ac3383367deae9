"""The fault matrix in the documentation is what the tests are."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.engine.test_fault_matrix import PHASES
from tests.fault_matrix import CELLS, COLUMNS, in_document, references, render

NO_WAY = {("start, before ready", "engine stopped"), ("between engine and next engine", "step raises")} | {
    ("between engine and next engine", "engine stopped")
}
"""An engine that is not there yet can't be stopped; without one no step runs."""


def test_every_named_test_exists() -> None:
    named = defaultdict(set)
    for reference in references():
        path, _, name = reference.partition("::")
        named[path].add(name)
    for path, names in named.items():
        tree = ast.parse((Path(__file__).parent / path).read_text(encoding="utf-8"))
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert names <= there, path


def test_every_cell_has_a_test() -> None:
    empty = {
        (phase, column)
        for phase, row in CELLS.items()
        for column, cell in zip(COLUMNS, row, strict=True)
        if not cell
    }
    assert empty == NO_WAY


def test_every_phase_of_a_switch_has_a_row() -> None:
    rows = " ".join(CELLS)
    words = {"step": "in a step", "probe": "shadow probe", "share": "growing share"}
    assert [phase for phase in PHASES if words.get(phase, phase) not in rows] == []


def test_the_document_shows_it() -> None:
    assert in_document() == render(), "python -m tests.fault_matrix"
