"""The gate on real processes, over HTTP: `python -m dynamictp.testing.gate_http --switches 30`.

Starts an undisturbed `tp1` server for the reference, then a server with three devices on which random
requests run, clients go away and the layout changes all the time.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

import click
import httpx
import msgspec

from dynamictp.testing.gate import (
    LAYOUTS,
    Arrival,
    GateReport,
    GateRequest,
    Stream,
    make_arrivals,
    make_requests,
)
from dynamictp.testing.server_process import ServerProcess

Progress = Callable[[str], None]
WARM_SWITCHES = 200
"""After so many a worker's memory has reached its level (measured: 155 MB after 120, 157 from 240 to 600)."""
_TIMEOUT = httpx.Timeout(300.0, connect=10.0)


def client_of(url: str, key: str = "") -> httpx.AsyncClient:
    """A client for many long streams."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT, limits=limits)


async def play(
    client: httpx.AsyncClient,
    request: GateRequest,
    cancel_after: int | None = None,
    on_tokens: Callable[[], None] = lambda: None,
) -> Stream:
    """Stream one request; close the connection after `cancel_after` tokens. `on_tokens` is called whenever
    some came."""
    stream = Stream()
    body = {
        "model": "demo",
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "stream": True,
        "logprobs": 2,
        "return_token_ids": True,
        **request.sampling,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                stream.error = f"status {response.status_code}: {(await response.aread())[:300]!r}"
                return stream
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(stream, msgspec.json.decode(line[6:]))
                    on_tokens()
                if cancel_after is not None and len(stream.tokens) >= cancel_after:
                    return stream
    except httpx.HTTPError as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


def _take(stream: Stream, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        stream.error = str(chunk["error"])
        return
    for choice in chunk["choices"]:
        stream.tokens.extend(choice.get("token_ids") or ())
        logprobs = choice.get("logprobs")
        if logprobs:
            stream.logprobs.extend(logprobs["token_logprobs"])
        stream.finish = choice.get("finish_reason") or stream.finish
    for served in chunk.get("dynamictp", {}).get("choices", ()):
        stream.tp_min, stream.tp_max = served["tp_min"], served["tp_max"]
        stream.handovers, stream.recomputes = served["handovers"], served["recomputes"]


async def reference_streams(
    url: str, requests: Sequence[GateRequest], key: str = "", *, at_once: int = 8
) -> list[Stream]:
    """Every request on an undisturbed server, a few at a time."""
    limit = asyncio.Semaphore(at_once)
    async with client_of(url, key) as client:

        async def one(request: GateRequest) -> Stream:
            async with limit:
                return await play(client, request)

        streams = await asyncio.gather(*(one(request) for request in requests))
    for number, stream in enumerate(streams):
        if stream.error is not None:
            raise RuntimeError(f"reference stream {number} failed: {stream.error}")
    return list(streams)


class _Disturbed:
    """One disturbed run: arrivals and switches until there were enough of the latter."""

    def __init__(
        self, url: str, requests: Sequence[GateRequest], references: Sequence[Stream], report: GateReport
    ) -> None:
        self._requests = requests
        self._references = references
        self._report = report
        self._rng = random.Random(report.seed + 2)
        self._client = client_of(url)
        self._admin = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT)
        self._live = 0

    async def run(self, switches: int, mean_gap_s: float, most_live: int, progress: Progress) -> None:
        """Until the report counts `switches` and the last stream has ended."""
        done = asyncio.Event()
        arriving = asyncio.create_task(self._arrive(done, mean_gap_s, most_live))
        try:
            while self._report.switches < switches:
                if await self._switch() and self._report.switches % 50 == 0:
                    progress(f"{self._report.switches} switches, {self._report.streams} streams")
        finally:
            done.set()
            await arriving

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        await self._admin.aclose()

    async def _arrive(self, done: asyncio.Event, mean_gap_s: float, most_live: int) -> None:
        running: set[asyncio.Task[None]] = set()
        while not done.is_set():
            seed = self._rng.randrange(1 << 30)
            for arrival in make_arrivals(seed, 64, len(self._requests), mean_gap_s=mean_gap_s):
                if done.is_set():
                    break
                await asyncio.sleep(arrival.gap_s)
                while len(running) >= most_live:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self._one(arrival))
                running.add(task)
                task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(set(running))

    async def _one(self, arrival: Arrival) -> None:
        stream = await play(self._client, self._requests[arrival.index], arrival.cancel_after)
        reference = self._references[arrival.index]
        # Its client left in mid-stream; a stream that ended before the client would have left did not.
        left = arrival.cancel_after is not None and len(stream.tokens) >= arrival.cancel_after
        cancelled = left and stream.finish is None
        self._report.add(arrival.index, reference, stream, cancelled)

    async def _switch(self) -> bool:
        """Ask for a random layout; False when a switch was in flight."""
        rng = self._rng
        body: dict[str, Any] = {
            "layout": rng.choice(LAYOUTS),
            "wait": rng.choice(("none", "commit", "commit", "closed")),
            "drain_deadline_s": rng.choice((0.0, 0.0, 0.2, 1.0)),
        }
        response = await self._admin.put("/admin/layout", json=body)
        if response.status_code == 409:
            self._report.refused += 1
            await asyncio.sleep(0.01)
            return False
        if response.status_code not in (200, 202):
            self._report.faults.append(
                f"switch to {body}: status {response.status_code} {response.text[:300]}"
            )
        self._report.switches += 1
        phases = response.json().get("switch", {}).get("phases_ms", {})
        if "commit" in phases:
            self._report.commit_ms.append(phases["commit"])
        await asyncio.sleep(rng.expovariate(1 / 0.25))
        return True


async def run_gate(
    seed: int,
    switches: int,
    *,
    distinct: int = 40,
    longest_prompt: int = 300,
    longest_output: int = 64,
    kv_memory: str = "32MiB",
    kernels: str = "auto",
    mean_gap_s: float = 0.25,
    most_live: int = 12,
    progress: Progress = lambda text: None,
) -> GateReport:
    """Reference on `tp1`, then the disturbed run. The arena is small, so that requests are preempted."""
    report = GateReport(seed)
    demo = ("serve", "demo", "--layout", "tp1", "--kernels", kernels, "--max-wait-s", "0")
    with ServerProcess(*demo, "--devices", "1", "--kv-memory", "1GiB") as server:
        requests = make_requests(
            seed, distinct, 49_152, longest_prompt=longest_prompt, longest_output=longest_output
        )
        references = await reference_streams(server.url, requests)
    progress(f"reference: {sum(len(stream.tokens) for stream in references)} tokens")
    arguments = (*demo, "--devices", "3", "--kv-memory", kv_memory)
    with ServerProcess(*arguments, environment={"DYNAMICTP_CHECK": "1"}) as server:
        async with _Disturbed(server.url, requests, references, report) as disturbed:
            # What is made once (compiled kernels, tables, buffers) is there after the first layouts.
            await disturbed.run(min(WARM_SWITCHES, switches // 3), mean_gap_s, most_live, progress)
            await come_to_rest(server.url)
            before = await server.footprint_at_rest()
            await disturbed.run(switches, mean_gap_s, most_live, progress)
            await come_to_rest(server.url)
            report.faults.extend(await server.lasting_leaks(before))
            report.notes.extend(server.growth(before))
            if report.faults:
                said = [line for line in server.lines if " INFO " not in line]
                report.notes.extend(f"server: {line}" for line in said[-50:])
    return replace(report)


async def come_to_rest(url: str, admin_key: str = "") -> None:
    """A new domain `tp1@0`, then quiet.

    An open domain has buffers, whose memory is there as far as its largest step reached: only domains
    that have not run compare.
    """
    await wait_quiet(url, admin_key)
    async with client_of(url, admin_key) as client:
        for layout in ("tp1@1", "tp1@0"):
            response = await client.put("/admin/layout", json={"layout": layout, "wait": "closed"})
            response.raise_for_status()
    await wait_quiet(url, admin_key)


async def wait_quiet(url: str, admin_key: str = "") -> None:
    """Wait until nothing runs, every old domain is closed and no page is in use."""
    async with client_of(url, admin_key) as client:
        for _ in range(600):
            layout = (await client.get("/admin/layout")).json()
            states = {domain["state"] for domain in layout["domains"]}
            used = sum(domain["kv_pages_used"] for domain in layout["domains"])
            running = sum(domain["running"] for domain in layout["domains"])
            if (
                states == {"serving"}
                and used == running == layout["waiting"] == 0
                and layout["switch"] is None
            ):
                return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the server did not come to rest: {layout}")


@click.command()
@click.option("--switches", default=30, show_default=True)
@click.option("--seed", type=int, help="default: random, printed")
@click.option("--distinct", default=40, show_default=True, help="distinct requests")
@click.option("--kv-memory", default="32MiB", show_default=True)
@click.option("--kernels", type=click.Choice(["auto", "torch", "native"]), default="auto", show_default=True)
def main(switches: int, seed: int | None, distinct: int, kv_memory: str, kernels: str) -> None:
    """Run the gate on real processes and print its report."""
    seed = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    click.echo(f"seed {seed}")
    began = time.monotonic()
    report = asyncio.run(
        run_gate(seed, switches, distinct=distinct, kv_memory=kv_memory, kernels=kernels, progress=click.echo)
    )
    for line in report.lines():
        click.echo(line)
    click.echo(f"{time.monotonic() - began:.0f} s")
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
