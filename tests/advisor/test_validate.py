"""The comparison of predictions and measurements, without a server."""

from __future__ import annotations

import msgspec
import pytest

from dynamictp.advisor import local
from dynamictp.advisor.catalogue import named_model
from dynamictp.advisor.local import Measured, local_machine, measured_by
from dynamictp.advisor.search import Question, make_plan
from dynamictp.advisor.validate import LAYOUTS, Comparison, Predicted, Setup, compare, played, predict
from dynamictp.advisor.workloads import find_workload
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.cost.calibration import Calibration, CalibrationPoint, RequestPoint
from dynamictp.cost.figures import Prediction
from dynamictp.cost.shape import ModelShape
from dynamictp.errors import FatalError

SMOL = ModelShape("smol", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)
FIGURES = Measured(28e9, 36e9, 230e9, "as given")
SETUP = Setup(users=6, seconds=10.0, scale=0.25)
CHAT = find_workload("chat", SETUP.scale)


def question(calibration: Calibration | None = None) -> Question:
    machine, limits = local_machine(2, FIGURES)
    return Question(
        SMOL,
        machine,
        find_workload("qa"),
        limits=limits,
        assumptions=local.ASSUMPTIONS,
        calibration=calibration,
    )


def test_this_computer_is_cores_on_one_memory() -> None:
    machine, limits = local_machine(2, FIGURES)
    assert machine.devices == 2
    assert machine.device.shared_memory
    assert machine.device.bandwidth.provenance == "measured"
    assert limits.kv_bytes <= 8 * 2**30
    plan = make_plan(question())
    assert {candidate.name for candidate in plan.candidates} == {"TP1 x 1", "TP1 x 2", "TP2 x 1"}


def test_a_calibration_brings_the_figures_its_ratios_refer_to() -> None:
    bare = Calibration("m", "d", "test", ())
    assert measured_by(bare) is None
    full = Calibration("m", "d", "test", (), bandwidth=28e9, shared_bandwidth=36e9, flops=230e9)
    found = measured_by(full)
    assert found is not None
    assert found.one_core_bandwidth == 28e9


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("workload", ["qa", "chat", "rag", "code"])
def test_every_prediction_is_finite_and_in_order(layout: str, workload: str) -> None:
    found = predict(question(), layout, find_workload(workload, SETUP.scale), SETUP)
    ttft = found.ttft
    assert found.tokens_per_s > 0
    assert 0 < found.tpot < 1
    assert ttft.bound <= ttft.low <= ttft.estimate <= ttft.high < 100


def test_a_slower_machine_is_predicted_slower() -> None:
    double = tuple(CalibrationPoint("base", tp, size, 2.0) for tp in (1, 2) for size in (1, 512))
    plain = predict(question(), "tp1", CHAT, SETUP)
    slower = predict(question(Calibration("m", "d", "test", double)), "tp1", CHAT, SETUP)
    assert slower.tokens_per_s < 0.7 * plain.tokens_per_s
    assert slower.tpot > 1.5 * plain.tpot


def test_a_request_is_outside_of_steps_for_as_long_as_was_measured() -> None:
    # Users of half a second outside of steps: 6 ÷ (0.5 + cycle) a second, and half a second more to the
    # first token than with none.
    points = tuple(CalibrationPoint("base", tp, size, 1.0) for tp in (1, 2) for size in (1, 512))
    none, half = (
        predict(
            question(
                Calibration("m", "d", "t", points, requests=(RequestPoint(0, seconds, seconds, seconds),))
            ),
            "tp2",
            CHAT,
            SETUP,
        )
        for seconds in (0.0, 0.5)
    )
    assert half.ttft.estimate - none.ttft.estimate == pytest.approx(0.5, abs=0.02)
    cycle = 6 / (none.tokens_per_s / CHAT.mean_output)
    assert half.tokens_per_s < none.tokens_per_s
    assert half.tokens_per_s > none.tokens_per_s * cycle / (cycle + 0.5), "fewer rows make faster steps"


def test_the_band_of_a_mean_has_its_sampling_error() -> None:
    # Waits of 0.2 s standard deviation, 16 of them: 1.645 x 0.2 / 4 = 82 ms beside the model's own 100 ms.
    found = Predicted(1.0, 0.1, Prediction(0.1, 0.4, 0.5, 0.6), wait_sigma=0.2)
    error = (0.1**2 + (1.6449 * 0.2 / 4) ** 2) ** 0.5
    band = found.ttft_of(16)
    assert band.low == pytest.approx(0.5 - error, abs=1e-4)
    assert band.high == pytest.approx(0.5 + error, abs=1e-4)
    assert found.ttft_of(10**8).high == pytest.approx(0.6, abs=1e-4)
    assert found.ttft_of(1).low == pytest.approx(0.5 - (0.1**2 + 0.329**2) ** 0.5, abs=1e-4)
    assert msgspec.structs.replace(found, wait_sigma=0.5).ttft_of(1).low == 0.1, (
        "never below what the hardware can"
    )


def result(sent_s: float, first_s: float, gap_s: float, tokens: int) -> Result:
    stamps = tuple(first_s + gap_s * i for i in range(tokens))
    request = Request(sent_s, "x", tokens)
    return Result(
        request,
        sent_s,
        sent_s,
        stamps[-1],
        chunk_s=stamps,
        chunk_tokens=(1,) * tokens,
        completion_tokens=tokens,
    )


def test_measured_figures_leave_the_start_out() -> None:
    results = [result(i, i + 0.2, 0.05, 11) for i in range(10)]
    row = compare(results, Predicted(10.0, 0.05, Prediction(0.1, 0.15, 0.2, 0.3), 0.0), "tp1", "qa", SETUP)
    # From second 2 on: eight requests of eleven tokens in eight seconds.
    assert row.tokens_per_s == pytest.approx(11.0)
    assert row.tpot == pytest.approx(0.05)
    assert row.ttft == pytest.approx(0.2)
    assert row.throughput_error == pytest.approx(-1 / 11)
    assert row.holds


def test_what_is_off_does_not_hold() -> None:
    good = Comparison("tp1", "qa", 5, 100.0, 110.0, 0.05, 0.05, 0.2, Prediction(0.1, 0.15, 0.2, 0.3))
    assert good.holds
    assert not msgspec.structs.replace(good, predicted_tokens_per_s=130.0).holds
    assert not msgspec.structs.replace(good, predicted_tpot=0.03).holds
    assert not msgspec.structs.replace(good, ttft=0.5).holds


def test_a_run_without_a_finished_request_is_an_error() -> None:
    with pytest.raises(FatalError, match="no request finished"):
        compare([], Predicted(1.0, 1.0, Prediction(0, 0, 0, 0), 0.0), "tp1", "qa", SETUP)


def test_the_catalogue_and_the_local_limits_go_together() -> None:
    machine, limits = local_machine(2, FIGURES)
    plan = make_plan(Question(named_model("llama-3.1-405b"), machine, find_workload("qa"), limits=limits))
    assert plan.best is None


def test_a_prediction_is_for_the_lengths_that_were_drawn() -> None:
    (kind,) = CHAT.classes
    results = [
        Result(Request(0.0, "x", output, prompt_tokens=prompt), 0.0, 0.0, 1.0)
        for prompt, output in ((10, 40), (50, 80))
    ]
    (drawn,) = played(results, "chat", SETUP).classes
    assert (drawn.prompt.typical, drawn.output.typical) == (pytest.approx(30), pytest.approx(60))
    assert drawn.output.sigma == pytest.approx(kind.output.sigma)
