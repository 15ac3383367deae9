"""Listening, refusing a port in use, stopping."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from dynamictp.errors import ResourceError
from dynamictp.server.run import ServerRunner
from tests.server.server_stack import Stack


async def test_start_gives_the_port_and_stop_frees_it(stack: Stack) -> None:
    runner = ServerRunner(stack.app, port=0)
    port = await runner.start()
    async with httpx.AsyncClient() as http:
        response = await http.get(f"http://127.0.0.1:{port}/health")
        assert response.status_code == 200
        assert "server" not in response.headers
        with pytest.raises(ResourceError, match=f"port {port}"):
            await ServerRunner(stack.app, port=port).start()
    await runner.stop()
    await runner.stop()
    again = ServerRunner(stack.app, port=port)
    assert await again.start() == port
    await again.stop()


async def test_an_address_that_is_not_here_is_refused(stack: Stack) -> None:
    with pytest.raises(ResourceError):
        await ServerRunner(stack.app, host="no-such-host.invalid", port=0).start()
    with pytest.raises(ResourceError):
        await ServerRunner(stack.app, host="203.0.113.1", port=0).start()


@pytest.mark.parametrize("host", ["a" * 70 + ".com", "..", "\ud800", "a\0b", "no such host"])
async def test_what_is_no_host_name_is_refused(stack: Stack, host: str) -> None:
    with pytest.raises(ResourceError, match="can't listen on"):
        await ServerRunner(stack.app, host, 0).start()


async def test_a_running_answer_may_end_before_the_server_does(stack: Stack) -> None:
    stack.engine.step_s = 0.005
    runner = ServerRunner(stack.app, port=0)
    port = await runner.start()
    async with httpx.AsyncClient() as http:
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
        answering = asyncio.create_task(http.post(f"http://127.0.0.1:{port}/v1/completions", json=body))
        while not stack.engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await runner.stop()
        assert (await answering).json()["usage"]["completion_tokens"] == 40
