"""The table of docs/failures.md: which test shows which fault in which phase. `python -m tests.fault_matrix`
writes it."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "failures.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"

WORKER = "engine/test_fault_matrix.py::test_a_worker_lost_in_any_phase"
ENGINE = "engine/test_fault_matrix.py::test_an_engine_lost_in_any_phase"
BOTH = "engine/test_fault_matrix.py::test_an_engine_and_a_worker_lost_together"
FAULTS = "fault/test_faults.py::test_a_hundred_faults_change_no_bit"
SERVER = "e2e/test_e2e_process_end.py::test_a_killed_server_takes_its_children_with_it"
SERVER_STARTS = "e2e/test_e2e_process_end.py::test_a_server_killed_during_the_start_leaves_no_process"
SERVER_RAMP = "e2e/test_e2e_process_end.py::test_a_server_killed_in_mid_ramp_with_a_leased_device"
STARTS = "e2e/test_e2e_process_end.py::test_a_child_that_dies_during_the_start_ends_the_server_with_a_reason"
LIVE = "e2e/test_e2e_faults.py::test_streams_keep_every_bit_over_a_fault"
SILENT = "server/test_recovery.py::test_an_engine_that_is_silent_is_killed_once"
PLANNED = (
    "server/test_control_plane.py::"
    "test_an_engine_lost_during_the_planner_s_switch_ends_in_the_last_committed_layout"
)
LEASED_ENGINE = "e2e/test_e2e_leases.py::test_a_restarted_engine_leaves_a_leased_device_alone"
HOLDER = "server/test_leases.py::test_a_holder_that_dies_loses_its_devices_and_the_engine_is_told"
COLUMNS = (
    "worker killed",
    "worker stopped or hanging",
    "step raises",
    "engine killed",
    "engine stopped",
    "server killed",
)
"""`worker` is one of the old side, of the new side, and of both."""

CELLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "idle": (
        (WORKER, "engine/test_failures.py::test_a_reaped_worker_fails_its_domains_and_frees_their_pages"),
        (WORKER, "engine/test_watch.py::test_an_idle_worker_that_owes_nothing_may_rest_for_ever"),
        (WORKER,),
        (ENGINE, "e2e/test_e2e_faults.py::test_a_layout_set_by_hand_survives_the_engine"),
        (SILENT,),
        (SERVER,),
    ),
    "in a step, tp1": (
        (WORKER, FAULTS),
        (WORKER, "engine/test_failures.py::test_a_worker_that_computes_for_ever_is_the_only_one_lost"),
        (WORKER, "e2e/test_e2e_faults.py::test_a_poison_request_fails_alone"),
        (ENGINE, FAULTS),
        (FAULTS,),
        (SERVER,),
    ),
    "in a collective": (
        (LIVE, FAULTS),
        (LIVE, "engine/test_failures.py::test_when_all_members_wait_the_one_that_does_not_leave_is_lost"),
        (LIVE, FAULTS),
        (LIVE, FAULTS),
        (LIVE, FAULTS),
        (SERVER,),
    ),
    "prepare, proof": (
        (WORKER, BOTH),
        (WORKER,),
        (WORKER, "engine/test_failures.py::test_a_switch_whose_new_domain_breaks_is_taken_back"),
        (ENGINE, BOTH),
        (FAULTS,),
        (SERVER,),
    ),
    "ramp: shadow probe": (
        (WORKER, BOTH),
        (WORKER, "engine/test_ramp.py::test_a_probe_that_does_not_end_takes_the_switch_back"),
        (WORKER,),
        (ENGINE, BOTH),
        (FAULTS,),
        (SERVER_RAMP,),
    ),
    "ramp: growing share": (
        (WORKER, BOTH, "engine/test_ramp.py::test_a_killed_worker_of_the_new_side_ends_in_the_layout_before"),
        (WORKER,),
        (WORKER, "engine/test_ramp.py::test_what_a_failing_new_domain_computed_is_thrown_away"),
        (ENGINE, BOTH, LEASED_ENGINE),
        (FAULTS,),
        (SERVER_RAMP,),
    ),
    "ramp: settle": ((WORKER, BOTH), (WORKER,), (WORKER,), (ENGINE, BOTH), (FAULTS,), (SERVER_RAMP,)),
    "ramp: rollback": ((WORKER, BOTH), (WORKER,), (WORKER,), (ENGINE, BOTH), (FAULTS,), (SERVER_RAMP,)),
    "commit, drain, close": (
        (WORKER, BOTH, "engine/test_random_switches.py::test_streams_survive_killed_workers"),
        (WORKER, "engine/test_failures.py::test_a_member_that_does_not_leave_is_reported_lost_once"),
        (WORKER,),
        (ENGINE, BOTH),
        (FAULTS,),
        (SERVER,),
    ),
    "the planner's switch": (
        (
            FAULTS,
            "engine/test_fault_matrix.py::test_a_switch_to_a_device_whose_worker_is_away_waits_for_the_next_one",
        ),
        (FAULTS,),
        (FAULTS,),
        (PLANNED, "server/test_control_plane.py::test_the_loop_goes_on_while_the_engine_is_away"),
        (PLANNED,),
        (SERVER,),
    ),
    "a lease is out": (
        (
            "e2e/test_e2e_leases.py::test_a_released_device_gives_its_worker_up_and_is_back_for_a_switch",
            FAULTS,
        ),
        (FAULTS,),
        (FAULTS,),
        (LEASED_ENGINE, HOLDER),
        (FAULTS,),
        (SERVER_RAMP, "server/test_leases.py::test_a_command_ends_when_the_server_is_lost_for_so_long"),
    ),
    "start, before ready": (
        (STARTS,),
        ("engine/test_failures.py::test_a_worker_that_never_says_hello_is_lost",),
        ("engine/test_failures.py::test_a_first_layout_that_does_not_open_ends_the_engine",),
        (STARTS,),
        (),
        (SERVER_STARTS,),
    ),
    "between engine and next engine": (
        (BOTH,),
        ("engine/test_failures.py::test_a_worker_that_does_not_greet_a_restarted_engine_is_lost",),
        (),
        (FAULTS,),
        (),
        (SERVER,),
    ),
}
"""By phase, a tuple of tests for each column; none where there is nothing that could fail so."""


def references() -> list[str]:
    return [reference for row in CELLS.values() for cell in row for reference in cell]


def render() -> str:
    lines = [f"| phase | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for phase, cells in CELLS.items():
        shown = (", ".join(map(_shown, cell)) or "–" for cell in cells)
        lines.append(f"| {phase} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(reference: str) -> str:
    special = {WORKER: "matrix", ENGINE: "matrix", BOTH: "matrix of two", FAULTS: "faults"}
    if reference in special:
        return special[reference]
    path, _, name = reference.partition("::")
    words = name.removeprefix("test_").split("_")
    return f"`{Path(path).stem}::{'_'.join(words[:6])}{'…' if len(words) > 6 else ''}`"


def in_document() -> str:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def write() -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{render()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write()
