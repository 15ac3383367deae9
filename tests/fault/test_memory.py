"""Memory stays bounded under a crowd (`scripts/test --fault`)."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time

import httpx
import psutil
import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.server.server_stack import on_port, running_stack

pytestmark = pytest.mark.fault

WAITING = 10_000
LONG = 150
"""Of them with prompts of 100 KB."""
PER_REQUEST_BYTES = 150 << 10
READERS = 1_000


async def until(condition: object, what: str, deadline_s: float = 240.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, what
        await asyncio.sleep(0.05)


def memory_of(server: ServerProcess) -> int:
    """Bytes of the server and of its engine that are theirs alone."""
    engine = [pid for pid, command in server.children().items() if "dynamictp.engine" in command]
    return sum(psutil.Process(pid).memory_full_info().uss for pid in (server.pid, *engine))


def request(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def connect(url: str, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
    writer.write(sent)
    await writer.drain()
    return reader, writer


def waiting_of(server: ServerProcess) -> int:
    name = "dtp_num_requests_waiting"
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return next(int(float(line.split()[1])) for line in text.splitlines() if line.startswith(name))


async def refusal(url: str, sent: bytes) -> bytes:
    """The first answer to requests of which those that are taken get none for long."""
    for _ in range(500):
        reader, writer = await connect(url, sent)
        try:
            return await asyncio.wait_for(reader.read(100), 0.5)
        except TimeoutError:
            pass
        finally:
            writer.close()
    raise AssertionError("everything is taken")


@pytest.mark.timeout(900)
async def test_ten_thousand_waiting_requests() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < WAITING + 1000:
        pytest.skip(f"only {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    arguments = ("--devices", "1", "--kv-memory", "256MiB", "--max-num-seqs", "8", "--max-wait-s", "0")
    try:
        with ServerProcess("serve", "demo", *arguments, "--max-waiting", str(WAITING)) as server:
            short = request({"prompt": [5] * 40, "max_tokens": 4000, "ignore_eos": True})
            long = request({"prompt": " responsibilities" * 6000, "max_tokens": 100})
            grown = []
            for _ in range(2):
                before = memory_of(server)
                connections = []
                for number in range(WAITING):
                    connections.append(await connect(server.url, long if number < LONG else short))
                await until(lambda: waiting_of(server) > WAITING - 200, "all wait")
                grown.append(memory_of(server) - before)
                print(f"{WAITING} waiting: {grown[-1] / 1e6:.0f} MB more")
                # The next one is told at once.
                extra = [await connect(server.url, short) for _ in range(50)]
                assert b" 503 " in await refusal(server.url, short)
                for _, each in (*connections, *extra):
                    each.close()
                await until(lambda: waiting_of(server) == 0, "all gone")
            assert grown[0] < WAITING * PER_REQUEST_BYTES
            assert grown[1] < grown[0] / 2 + (100 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(600)
async def test_a_thousand_clients_that_do_not_read() -> None:
    process = psutil.Process()
    async with running_stack(max_model_len=1_000_000) as stack, on_port(stack) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        body = {"prompt": "x", "max_tokens": 100_000, "stream": True, "logprobs": 20, "ignore_eos": True}
        loop, clients = asyncio.get_running_loop(), []
        before = process.memory_full_info().uss
        for _ in range(READERS):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, request(body))
            clients.append(client)
        most = 0

        def all_given_up() -> bool:
            nonlocal most
            most = max(most, process.memory_full_info().uss - before)
            return len(clients) == READERS and stack.service.client.live == 0

        await until(all_given_up, "every stream is given up", 400.0)
        print(f"{READERS} clients that do not read: {most / 1e6:.0f} MB more at most")
        assert most < READERS * (1 << 20)
        for client in clients:
            client.close()
