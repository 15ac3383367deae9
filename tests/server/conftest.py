from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.server.server_stack import Stack, running_stack


@pytest_asyncio.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack() as running:
        yield running
