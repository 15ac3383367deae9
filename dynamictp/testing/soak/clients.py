"""Clients of the soak: what they send, how they misbehave, and what they count."""

from __future__ import annotations

import asyncio
import functools
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from dynamictp.testing.gate import LAYOUTS, GateRequest, Stream, judge
from dynamictp.testing.gate_http import client_of, play

STREAMS = 14
BUSY_S, QUIET_S = 20.0, 30.0
"""Phases of the load, so that the planner has something to do."""
QUIET_STREAMS = 1
FLOOD = 120
FLOOD_EVERY_S = 45.0
"""At least; floods come with the other load."""
SLOW_READERS = 3
COLD_CONNECTIONS = 8
REFUSED = ("status 429", "status 503")


@dataclass
class Scene:
    """What all clients share. Owner of the counts and of what went wrong."""

    url: str
    keys: Sequence[str]
    admin_key: str
    requests: Sequence[GateRequest]
    references: Sequence[Stream]
    rng: random.Random
    count: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    release_until_s: float = 0.0
    """Until then leases may end workers; what grows in those that begin later could be their beginning."""

    def api(self) -> httpx.AsyncClient:
        return client_of(self.url, self.rng.choice(self.keys))

    def admin(self) -> httpx.AsyncClient:
        return client_of(self.url, self.admin_key)

    async def rest(self, seconds: float) -> bool:
        """Wait; False when the soak is over."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)
        return not self.over.is_set()

    def wrong(self, text: str) -> None:
        self.count["wrong"] += 1
        if len(self.faults) < 50:
            self.faults.append(text[:400])


def everyone() -> list[Callable[[Scene], Awaitable[None]]]:
    """The whole crowd."""
    streams = [functools.partial(stream_all_the_time, number=number) for number in range(STREAMS)]
    return [
        *streams,
        *[read_slowly] * SLOW_READERS,
        *[stay_cold] * COLD_CONNECTIONS,
        flood,
        ask_odd_things,
        switch,
        lease,
        lease_by_command,
        observe,
    ]


# ------------------------------------------------------------ streams


async def stream_all_the_time(scene: Scene, number: int) -> None:
    """One stream after the other, each compared with its reference; some leave, some have no time."""
    rng = scene.rng
    async with scene.api() as http:
        while await scene.rest(rng.uniform(0.0, 0.2)):
            if number >= QUIET_STREAMS and not _busy():
                await scene.rest(1.0)
                continue
            index = rng.randrange(len(scene.requests))
            hurried = rng.random() < 0.05
            request = _hurried(scene.requests[index], rng) if hurried else scene.requests[index]
            leaves = rng.randint(0, 20) if rng.random() < 0.15 else None
            stream = await play(http, request, leaves)
            _judge(scene, index, stream, hurried=hurried, left=leaves is not None and stream.finish is None)


def _busy() -> bool:
    return time.monotonic() % (BUSY_S + QUIET_S) < BUSY_S


def _hurried(request: GateRequest, rng: random.Random) -> GateRequest:
    return replace(request, sampling={**request.sampling, "timeout": rng.uniform(0.01, 1.0)})


def _judge(scene: Scene, index: int, stream: Stream, *, hurried: bool, left: bool) -> None:
    scene.count["tokens"] += len(stream.tokens)
    error = stream.error
    if error is not None and error.startswith(REFUSED):
        scene.count["refused"] += 1
        return
    if error is not None and hurried and ("status 504" in error or "deadline_exceeded" in error):
        scene.count["out of time"] += 1
        return
    scene.count["left" if left else "streams"] += 1
    fault = judge(scene.references[index], stream, cancelled=left)
    if fault:
        scene.wrong(f"stream {index}: {fault}")


async def flood(scene: Scene) -> None:
    """Many at once, now and then: most are refused, and told when to come back."""
    while await scene.rest(FLOOD_EVERY_S):
        while not _busy():
            if not await scene.rest(1.0):
                return
        async with scene.api() as http:
            body = {"prompt": [7, 8, 9] * 40, "max_tokens": 8, "ignore_eos": True}
            posts = [http.post("/v1/completions", json=body) for _ in range(FLOOD)]
            for response in await asyncio.gather(*posts, return_exceptions=True):
                if isinstance(response, BaseException):
                    scene.wrong(f"flood: {response!r}")
                elif response.status_code in (429, 503) and response.headers.get("retry-after", "").isdigit():
                    scene.count["refused in a flood"] += 1
                elif response.status_code != 200:
                    scene.wrong(f"flood: status {response.status_code} {response.text}")


# ------------------------------------------------------------ clients that misbehave


async def read_slowly(scene: Scene) -> None:
    """A long stream of which little is read."""
    rng = scene.rng
    body = {"prompt": "x", "max_tokens": 500, "stream": True, "logprobs": 20, "ignore_eos": True}
    while await scene.rest(rng.uniform(0.5, 10.0)):
        sent = _http("POST", "/v1/completions", rng.choice(scene.keys), msgspec.json.encode(body))
        connection = await _connect(scene.url, sent, receive_bytes=4096)
        scene.count["slow readers"] += 1
        for _ in range(rng.randint(0, 4)):
            with suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 2048), 2.0)
        await scene.rest(rng.choice((0.1, 3.0, 40.0)))
        connection.close()


async def stay_cold(scene: Scene) -> None:
    """A connection that sends the beginning of a request, the first one or a later one, and no more."""
    rng, loop = scene.rng, asyncio.get_running_loop()
    while await scene.rest(rng.uniform(0.5, 5.0)):
        whole = _http("GET", "/health", "", b"")
        start = _http("POST", "/v1/completions", rng.choice(scene.keys), b"x" * 1000)
        sent = rng.choice((b"", whole)) + start[: rng.randrange(len(start) - 900)]
        connection = await _connect(scene.url, sent)
        scene.count["cold connections"] += 1
        with suppress(TimeoutError, ConnectionError):
            # Until the server closes it, or its owner loses interest.
            async with asyncio.timeout(rng.choice((0.5, 5.0, 45.0))):
                while not scene.over.is_set() and await loop.sock_recv(connection, 4096):
                    scene.count["answers to the cold"] += 1
        connection.close()


async def _connect(url: str, sent: bytes, receive_bytes: int = 0) -> socket.socket:
    address = urlsplit(url)
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (address.hostname, address.port))
    await loop.sock_sendall(connection, sent)
    return connection


def _http(method: str, path: str, key: str, body: bytes) -> bytes:
    lines = (
        f"{method} {path} HTTP/1.1",
        "host: 127.0.0.1",
        f"authorization: Bearer {key}",
        f"content-length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


_GOOD = "/v1/completions"
_ODD: tuple[tuple[str, str, Mapping[str, Any], set[int]], ...] = (
    ("POST", _GOOD, {"json": {"prompt": "x", "max_tokens": -1}}, {400}),
    ("POST", _GOOD, {"json": {"prompt": "x", "n": 1000}}, {400}),
    ("POST", _GOOD, {"content": b"{"}, {400}),
    ("POST", _GOOD, {"content": b'{"prompt": "\xff"}'}, {400}),
    ("POST", _GOOD, {"content": b"[" * 100_000}, {400}),
    ("POST", _GOOD, {"content": b"x" * (9 << 20)}, {413}),
    ("POST", _GOOD, {"json": {"prompt": "x"}, "headers": {"authorization": "Bearer no"}}, {401}),
    ("GET", "/no/such/thing", {}, {404}),
    ("DELETE", _GOOD, {}, {405}),
    ("GET", "/v1/models", {}, {200}),
    ("POST", "/tokenize", {"json": {"prompt": "Once upon a time " * 50}}, {200}),
    ("POST", "/detokenize", {"json": {"tokens": [5, 6, 7]}}, {200}),
    ("POST", _GOOD, {"json": {"prompt": ["a", "b", "c", "d"], "n": 2, "max_tokens": 4}}, {200, 429, 503}),
    (
        "POST",
        "/v1/chat/completions",
        {"json": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stop": ["a"]}},
        {200, 429, 503},
    ),
    ("POST", _GOOD, {"json": {"prompt": "x", "echo": True, "logprobs": 5, "max_tokens": 3}}, {200, 429, 503}),
)


async def ask_odd_things(scene: Scene) -> None:
    """One request of every kind after the other, sound and unsound ones."""
    while True:
        async with scene.api() as http:
            for method, path, fields, expected in _ODD:
                if not await scene.rest(scene.rng.uniform(0.1, 0.8)):
                    return
                try:
                    response = await http.request(method, path, **fields)
                except httpx.HTTPError as error:
                    # Who sends far too much may lose the connection before the answer.
                    if 413 not in expected:
                        scene.wrong(f"{method} {path}: {error!r}")
                    continue
                scene.count["odd requests"] += 1
                if response.status_code not in expected:
                    scene.wrong(f"{method} {path}: status {response.status_code} {response.text}")


# ------------------------------------------------------------ operators


async def switch(scene: Scene) -> None:
    """Layouts by hand, with and without ramps, some taken back; then a while of the planner's."""
    rng = scene.rng
    async with scene.admin() as http:
        while not scene.over.is_set():
            for _ in range(rng.randint(3, 8)):
                if not await scene.rest(rng.uniform(0.5, 3.0)):
                    return
                await _switch_once(scene, http)
            response = await http.put("/admin/layout", json={"layout": "auto"})
            if response.status_code != 200:
                scene.wrong(f"auto: status {response.status_code} {response.text}")
            await scene.rest(rng.uniform(QUIET_S, BUSY_S + QUIET_S))


async def _switch_once(scene: Scene, http: httpx.AsyncClient) -> None:
    rng = scene.rng
    body = {
        "layout": rng.choice(LAYOUTS),
        "wait": rng.choice(("none", "commit", "closed")),
        "ramp": rng.random() < 0.4,
        "drain_deadline_s": rng.choice((0.0, 0.0, 0.5)),
    }
    response = await http.put("/admin/layout", json=body)
    # 409: one in flight, leased devices, rolled back on a busy machine; 503: leases were not back in time.
    if response.status_code not in (200, 202, 409, 503, 504):
        scene.wrong(f"switch {body}: status {response.status_code} {response.text}")
    scene.count[f"switches answered {response.status_code}"] += 1
    if response.status_code == 202 and rng.random() < 0.5:
        path = f"/admin/switches/{response.json()['switch']['id']}"
        taken_back = await http.delete(path)
        scene.count["switches taken back"] += taken_back.status_code == 200
        if taken_back.status_code not in (200, 409, 504):
            scene.wrong(f"DELETE {path}: status {taken_back.status_code} {taken_back.text}")


async def lease(scene: Scene) -> None:
    """Devices for a while: given back, called back, or left to expire."""
    rng = scene.rng
    async with scene.admin() as http:
        while await scene.rest(rng.uniform(0.5, 4.0)):
            released = time.monotonic() < scene.release_until_s and rng.random() < 0.1
            level = "released" if released else "standby"
            asked = {"devices": 1, "level": level, "notice_s": 2, "grace_s": 1, "wait_s": 10}
            response = await http.post("/admin/leases", json=asked)
            scene.count[f"leases answered {response.status_code}"] += 1
            if response.status_code != 201:
                if response.status_code != 409:
                    scene.wrong(f"lease: status {response.status_code} {response.text}")
                continue
            path = f"/admin/leases/{response.json()['id']}"
            if rng.random() < 0.1:
                scene.count["leases left to expire"] += 1
                continue
            await _hold(scene, http, path, rng.uniform(1.0, 8.0))


async def _hold(scene: Scene, http: httpx.AsyncClient, path: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and await scene.rest(0.5):
        state = await http.put(path)
        if state.status_code == 404 or state.json().get("state") == "revoking":
            scene.count["leases called back"] += 1
            break
    response = await http.delete(path)
    if response.status_code not in (200, 404):
        scene.wrong(f"DELETE {path}: status {response.status_code} {response.text}")


async def lease_by_command(scene: Scene) -> None:
    """`dynamictp lease` runs a command now and then."""
    command = [sys.executable, "-m", "dynamictp", "lease", "--url", scene.url, "--admin-key", scene.admin_key]
    while await scene.rest(scene.rng.uniform(30.0, 60.0)):
        process = await asyncio.create_subprocess_exec(
            *command, "--wait", "10", "--notice", "2", "--grace", "1", "--", "sleep", "2",
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        code = await process.wait()
        scene.count[f"commands with exit code {code}"] += 1
        if code not in (0, 75, 76):
            scene.wrong(f"dynamictp lease: exit code {code}")


async def observe(scene: Scene) -> None:
    """What a dashboard and an operator ask for, and parameters that are set anew."""
    paths = (
        "/metrics", "/dashboard", "/admin/history", "/admin/layout", "/admin/switches", "/admin/leases",
        "/admin/decisions?last=50&snapshots=1", "/admin/journal", "/admin/config",
    )  # fmt: skip
    rng = scene.rng
    async with scene.admin() as http:
        while await scene.rest(rng.uniform(0.3, 1.5)):
            if rng.random() < 0.1:
                response = await http.put("/admin/config", json={"shrink_load": rng.uniform(0.3, 0.4)})
            else:
                response = await http.get(rng.choice(paths))
            scene.count["looks"] += 1
            if response.status_code != 200:
                scene.wrong(f"{response.request.url}: status {response.status_code} {response.text}")
