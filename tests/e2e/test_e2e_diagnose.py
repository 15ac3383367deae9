"""What limits a real server: situations made on purpose, and what `dynamictp diagnose` says of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dynamictp import native
from dynamictp.observe.findings import FOREIGN_CORES
from dynamictp.testing.server_process import ServerProcess
from tests.e2e.live import TIMEOUT_S, Api, run_cli, until
from tests.model.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        native.load() is None, reason="needs the native extension: torch's steps are not divided"
    ),
]

WATCH_S = "3"


@pytest.fixture(scope="module")
def crowded() -> Iterator[Api]:
    """Four devices, whatever the number of cores, with few slots and little KV memory: 16 pages of each head
    a device."""
    flags = ("--devices", "4", "--max-num-seqs", "8", "--kv-memory", "96MiB", "--max-wait-s", "0")
    with ServerProcess("serve", "demo", *flags) as server, Api(server.url) as api:
        yield api


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A model whose steps take a tenth of a millisecond."""
    folder = make_checkpoint("qwen2", tmp_path_factory.mktemp("checkpoint") / "small", tied=False)
    flags = ("--devices", "1", "--kv-memory", "64MiB", "--served-model-name", "demo")
    with ServerProcess("serve", str(folder), *flags) as server, Api(server.url) as api:
        yield api


@asynccontextmanager
async def streams(url: str, count: int, prompt_tokens: int, output_tokens: int) -> AsyncIterator[None]:
    """So many clients, each of which asks again as soon as it has its answer. They cost next to no
    processor time: an answer comes in one piece."""

    async def client(http: httpx.AsyncClient, index: int) -> None:
        prompt = [100 + index] * prompt_tokens
        body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
        while True:
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
        clients = [asyncio.create_task(client(http, index)) for index in range(count)]
        try:
            yield
            assert not any(one.done() for one in clients), [one.exception() for one in clients if one.done()]
        finally:
            for one in clients:
                one.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


@dataclass(frozen=True)
class Seen:
    """What the command said."""

    findings: list[dict[str, Any]]
    figures: dict[str, Any]

    @property
    def verdicts(self) -> list[str]:
        return [finding["verdict"] for finding in self.findings]

    def evidence(self, verdict: str) -> str:
        return "; ".join(
            line for finding in self.findings if finding["verdict"] == verdict for line in finding["evidence"]
        )

    def without_neighbours(self) -> list[str]:
        """The verdicts. A machine that others use as well says so, and then that is a cause before all."""
        disturbed = (self.figures["foreign_cores"] or 0) >= FOREIGN_CORES or self.figures["steal_cores"]
        named = "other processes" in self.evidence("host_bound") or "hypervisor" in self.evidence(
            "host_bound"
        )
        return [v for v in self.verdicts if not (disturbed and named and v == "host_bound")]


async def diagnosed(
    api: Api, count: int, prompt_tokens: int, output_tokens: int, begun: Callable[[], object]
) -> Seen:
    """The diagnosis of a server under such a load, from when `begun` holds on."""
    async with streams(api.url, count, prompt_tokens, output_tokens):
        await asyncio.to_thread(until, begun, "the situation is there", TIMEOUT_S)
        done = await asyncio.to_thread(run_cli, "diagnose", api.url, "--seconds", WATCH_S, "--json")
    assert done.returncode == 0, done.stderr
    await asyncio.to_thread(until, lambda: not api.in_use(), "nothing in use any more")
    told = json.loads(done.stdout)
    return Seen(told["diagnosis"]["findings"], told["figures"])


def decoded(api: Api, steps: int) -> Callable[[], bool]:
    """So many decode steps more than until now: the prompts are done. The server may have served others."""

    def so_far() -> float:
        return api.metric("dtp_steps_total", phase="decode")

    before = so_far()
    return lambda: so_far() > before + steps


async def test_a_few_streams_are_bound_by_memory(api: Api) -> None:
    seen = await diagnosed(api, 2, 300, 1200, decoded(api, 100))
    assert seen.without_neighbours() == ["memory_bound"], seen
    # Tokens are counted when they come, steps four times a second.
    told = re.search(r"([\d.]+) tokens per step", seen.evidence("memory_bound"))
    assert told is not None
    assert 1.2 < float(told[1]) < 3


async def test_ranks_that_share_cores_are_bound_by_communication(crowded: Api) -> None:
    crowded.set_layout("tp4")
    seen = await diagnosed(crowded, 2, 20, 400, lambda: crowded.metric("dtp_num_requests_running") == 2)
    assert seen.without_neighbours()[0] == "communication_bound", seen
    assert "2 ranks share a core" in seen.evidence("communication_bound")
    assert "memory_bound" not in seen.verdicts


async def test_more_requests_than_slots_are_a_queue(crowded: Api) -> None:
    crowded.set_layout("tp1")
    seen = await diagnosed(crowded, 24, 20, 24, lambda: crowded.metric("dtp_num_requests_waiting") >= 8)
    assert seen.without_neighbours() == ["queueing", "memory_bound"], seen
    assert "all slots in use" in seen.evidence("queueing")
    assert "of a TTFT" in seen.evidence("queueing")


async def test_long_answers_in_little_memory_fill_it(crowded: Api) -> None:
    crowded.set_layout("tp1")
    before = crowded.metric("dtp_preemptions_total")
    seen = await diagnosed(crowded, 8, 20, 900, lambda: crowded.metric("dtp_preemptions_total") > before)
    assert seen.without_neighbours()[0] == "kv_full", seen
    assert "KV pages held by requests: up to" in seen.evidence("kv_full")


async def test_a_small_model_is_bound_by_its_host(tiny: Api) -> None:
    seen = await diagnosed(tiny, 1, 20, 1500, decoded(tiny, 100))
    assert seen.verdicts[0] == "host_bound", seen
    assert "neither weights, attention nor waits" in seen.evidence("host_bound")
    assert "memory_bound" not in seen.verdicts


async def test_advice_does_not_contradict_itself(crowded: Api) -> None:
    """Slots and pages are short at once, and few tokens share a step."""
    crowded.set_layout("tp1")
    full = lambda: crowded.metric("dtp_kv_cache_usage_ratio") > 0.9  # noqa: E731
    seen = await diagnosed(crowded, 24, 20, 600, full)
    advice = [line for finding in seen.findings for line in finding["advice"]]
    assert seen.without_neighbours()[:2] == ["kv_full", "queueing"], seen
    assert len(advice) == len(set(advice))
    assert sum("--max-num-seqs" in line or "in parallel" in line for line in advice) == 1, advice
    assert sum("wide" in line or "narrow" in line for line in advice) == 1, advice
