"""Long texts neither pile up nor keep others waiting."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dynamictp.server.texts import INLINE_CHARS, LONG_CHARS, THREADS, TextThreads
from tests.server.server_stack import Stack


class Work:
    """Blocks its thread until it is told to end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.may_end.wait(30)
        return threading.current_thread().name


async def began(work: Work) -> None:
    while not work.began.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_long_texts_are_worked_on_one_after_the_other_and_nobody_else_waits() -> None:
    threads = TextThreads()
    first, second, short = Work(), Work(), Work()
    tasks = [asyncio.create_task(threads.run(LONG_CHARS + 1, work)) for work in (first, second)]
    await began(first)
    others = asyncio.create_task(threads.run(LONG_CHARS, short))
    await began(short)
    # What else uses threads has its own, the planner among them.
    assert await asyncio.to_thread(lambda: 7) == 7
    short.may_end.set()
    assert (await others).startswith("text")
    assert not second.began.is_set()
    first.may_end.set()
    await began(second)
    second.may_end.set()
    assert all(name.startswith("long-text") for name in await asyncio.gather(*tasks))


async def test_however_many_texts_there_are_other_threads_are_free() -> None:
    threads = TextThreads()
    works = [Work() for _ in range(3 * THREADS)]
    tasks = [asyncio.create_task(threads.run(INLINE_CHARS + 1, work)) for work in works]
    await began(works[THREADS - 1])
    assert sum(work.began.is_set() for work in works) == THREADS
    assert await asyncio.to_thread(lambda: 7) == 7
    assert await threads.run(INLINE_CHARS, threading.current_thread) is threading.current_thread()
    for work in works:
        work.may_end.set()
    await asyncio.gather(*tasks)


async def test_work_that_fails_says_so_from_every_thread() -> None:
    threads = TextThreads()

    def fail() -> None:
        raise ValueError("boom")

    for size in (1, INLINE_CHARS + 1, LONG_CHARS + 1):
        with pytest.raises(ValueError, match="boom"):
            await threads.run(size, fail)


async def test_texts_of_every_length_are_tokenized(stack: Stack) -> None:
    for length in (1, INLINE_CHARS + 1, LONG_CHARS + 1):
        answer = (await stack.http.post("/tokenize", json={"prompt": "a" * length})).json()
        assert answer["count"] == length
        again = await stack.http.post("/detokenize", json={"tokens": answer["tokens"]})
        assert again.json()["prompt"] == "a" * length
