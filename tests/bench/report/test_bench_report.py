"""The report is one page that loads nothing, and shows what the record holds."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest
from rich.console import Console

from dynamictp.bench.admin import Switch
from dynamictp.bench.measure import run_figures
from dynamictp.bench.record import Bench, ClientFacts, LayoutSample, Run, ServerFacts, Slo
from dynamictp.bench.report import page, table
from dynamictp.bench.report.series import distribution, gaps_around, points, rates
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.watcher import changes_of
from dynamictp.bench.workload.classes import Workload


def stream(i: int, gap_s: float) -> Result:
    due_s = i * 0.25
    chunk_s = tuple(due_s + 0.1 + gap_s * k for k in range(20))
    name, tenant = ("chat", "rag")[i % 2], ("gold", "free")[i % 3 == 0]
    failure = Failure(FailureKind.TIMEOUT, "late") if i == 7 else None
    request = Request(due_s, "", 20, name=f"r{i}", traffic_class=name, tenant=tenant, prompt_tokens=50)
    return Result(
        request, due_s, due_s + 0.001, chunk_s[-1], chunk_s, (1,) * 20, prompt_tokens=50, failure=failure
    )


def run_of(label: str, gap_s: float, *switches: Switch) -> Run:
    results = tuple(stream(i, gap_s) for i in range(40))
    samples = tuple(LayoutSample(0.5 * i, "tp1" if i < 10 else "tp2", 2, 1) for i in range(20))
    facts = ServerFacts("http://s:1", "mo<del", "dynamictp", layout={"observed": "tp1"})
    return Run(
        label, "2030-01-01T00:00:00+00:00", facts, ClientFacts(0.05, "A CPU", "3.11"), 10.0, 11.0, results,
        samples=samples, switches=switches,
    )  # fmt: skip


def bench_of(*runs: Run) -> Bench:
    workload = msgspec.json.decode(msgspec.json.encode(Workload()))
    return Bench(workload, 7, "a" * 64, "b" * 64, "server", 0, 3, Slo(), runs, "0.1.0")


SWITCH = Switch("tp1", "tp2", "closed", {"commit": 1.0}, 1, 0, 0, 4.8, 5.1)


@pytest.fixture(scope="module")
def html() -> str:
    bench = bench_of(run_of("tp1 → <b>", 0.03, SWITCH), run_of("2*tp1", 0.05))
    return page.render(bench, [run_figures(run, bench.slo) for run in bench.runs])


class References(HTMLParser):
    """Every address a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")
        ]


def test_the_page_asks_the_network_for_nothing(html: str) -> None:
    parser = References()
    parser.feed(html)
    assert all(reference.startswith("#") for reference in parser.found)
    assert not {"script", "link", "img", "iframe", "object"} & set(parser.tags)
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)
    assert "default-src 'none'" in html


def test_the_page_holds_every_plot_and_table(html: str) -> None:
    # goodput, three distributions (all, class, tenant), and per run a timeline; gaps where a switch was
    assert html.count("<svg ") == 1 + 3 + 2 + 2
    for words in ("tp1 → &lt;b&gt;", "mo&lt;del", "Running streams around switches", "seed 7", "1 timeout",
                  "longest chunk gap", "By tenant", "3 prompts longer than planned"):  # fmt: skip
        assert words in html, words
    assert "<b>" not in html.replace("<b>Invalid", "")


def test_ids_of_different_plots_do_not_collide(html: str) -> None:
    clips = re.findall(r'<clipPath id="([^"]+)"', html)
    assert len(clips) == len(set(clips))


def test_an_invalid_run_is_shown_in_red() -> None:
    run = run_of("late", 0.03)
    late = tuple(
        Result(r.request, r.intended_s, r.intended_s + 0.05, r.end_s, r.chunk_s, r.chunk_tokens)
        for r in run.results
    )
    invalid = Run("late", "", run.server, run.client, 10.0, 11.0, late)
    bench = bench_of(invalid)
    figures = [run_figures(invalid, bench.slo)]
    assert "Invalid run: late" in page.render(bench, figures)
    assert "INVALID: the client fell behind" in shown(bench)


def shown(bench: Bench) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table.render(bench, [run_figures(run, bench.slo) for run in bench.runs]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_runs_classes_and_tenants() -> None:
    text = shown(bench_of(run_of("one", 0.03), run_of("two", 0.05)))
    for words in (
        "one",
        "two",
        "goodput",
        "– (n=39)",
        "two, by tenant",
        "plan aaaaaaaaaaaa",
        "1 (1 timeout)",
    ):
        assert words in text, words


def test_distributions_keep_their_ends_when_thinned() -> None:
    results = [Result(Request(0.0, "", 1), 0.0, 0.0, 1.0, (i * 1e-3,), (1,)) for i in range(1, 10_001)]
    values, shares = distribution(results, lambda result: result.ttft_s)
    assert len(values) <= 3000
    assert (values[0], values[-1], shares[-1]) == (1e-3, 10.0, 1.0)
    x, y = points([float(i) for i in range(10_000)], [0.0] * 9_999 + [5.0])
    assert len(x) <= 3000
    assert y.max() == 5.0


def test_rates_add_up_to_what_was_seen() -> None:
    run = run_of("one", 0.03)
    seen = rates(run)
    assert seen.decode_per_s.sum() * seen.bin_s == pytest.approx(40 * 20)
    assert seen.prefill_per_s.sum() * seen.bin_s == pytest.approx(40 * 50)
    request_seconds = sum(r.end_s - r.sent_s for r in run.results)
    assert seen.running.sum() * seen.bin_s == pytest.approx(request_seconds)


def test_gaps_around_a_switch_are_those_of_streams_that_ran() -> None:
    run = run_of("one", 0.03, SWITCH)
    (change,) = changes_of(run)
    seen = gaps_around(run, change)
    assert seen is not None
    assert seen.streams == sum(r.chunk_s[0] <= 5.1 and r.chunk_s[-1] >= 4.8 for r in run.results)
    assert seen.longest_s == pytest.approx(0.03)
    assert np.all(np.abs(seen.offsets_s) <= 3.4)
    nobody = Switch("tp1", "tp2", "closed", {}, 0, 0, 0, 30.0, 30.1)
    assert gaps_around(run, changes_of(run_of("x", 0.03, nobody))[-1]) is None
