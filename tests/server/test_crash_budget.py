"""How often a process may crash, and the pauses in between."""

from __future__ import annotations

from dynamictp.server.crash_budget import LONGEST_PAUSE_S, WINDOW_S, CrashBudget


def test_a_process_that_lived_is_replaced_at_once() -> None:
    budget = CrashBudget(5)
    assert [budget.crashed(now, 5.0) for now in (10.0, 20.0, 30.0)] == [0.0, 0.0, 0.0]


def test_quick_deaths_make_longer_and_longer_pauses() -> None:
    budget = CrashBudget(100)
    pauses = [budget.crashed(float(now), 0.1) for now in range(9)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert budget.crashed(9.0, 3.0) == 0.0
    assert budget.crashed(10.0, 0.1) == 0.25


def test_the_budget_is_spent_within_a_window() -> None:
    budget = CrashBudget(2)
    assert budget.crashed(0.0, 9.0) == 0.0
    assert budget.crashed(1.0, 9.0) == 0.0
    assert budget.crashed(WINDOW_S + 0.5, 9.0) == 0.0
    assert budget.crashed(WINDOW_S + 0.6, 9.0) is None


def test_no_budget_at_all() -> None:
    assert CrashBudget(0).crashed(0.0, 1000.0) is None
