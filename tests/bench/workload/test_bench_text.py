"""Texts have exactly the planned number of tokens, and share what the plan says they share."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from dynamictp.bench.schedule import Message, schedule_digest
from dynamictp.bench.workload.classes import Prefixes, Turns, Workload, parse_mix
from dynamictp.bench.workload.plan import Block, Plan, PlannedRequest, make_plan
from dynamictp.bench.workload.text import TextMaker, sentences
from dynamictp.bench.workload.tokens import (
    ApproximateCounter,
    Exactness,
    FileCounter,
    Prompt,
    ServerCounter,
    calibrated,
)
from dynamictp.errors import ConfigError, FatalError


class PieceCounter:
    """Like a byte-pair tokenizer: words break into pieces of up to five letters, digits stand alone; a chat
    message costs four tokens more and the template seven.
    """

    exactness: Exactness = "server"

    def __init__(self) -> None:
        self.calls = 0

    async def count(self, prompt: Prompt, *, special: bool = True) -> int:
        self.calls += 1
        if isinstance(prompt, str):
            return len(re.findall(r" ?[A-Za-z]{1,5}|\d|[^\w\s]", prompt)) + special
        return 7 + sum([4 + await self.count(message.content, special=False) for message in prompt])


WORKLOAD = Workload(
    arrivals="poisson:2", duration_s=30.0, classes=parse_mix("a(30/90:20/40),b(300/800:9)=0.5")
)


async def test_every_prompt_has_exactly_the_planned_tokens() -> None:
    plan, counter = make_plan(WORKLOAD), PieceCounter()
    schedule = await TextMaker(counter, 0).schedule(plan, "chat", {})
    per_prompt = counter.calls / len(schedule)
    for planned, request in zip(plan.requests, schedule, strict=True):
        counted = await counter.count([Message("user", str(request.prompt))])
        assert counted == request.prompt_tokens
        assert counted == max(planned.prompt_tokens, counted if planned.prompt_tokens < 25 else 0)
    assert per_prompt < 9


async def test_completions_count_their_special_tokens() -> None:
    plan, counter = make_plan(replace(WORKLOAD, endpoint="completions")), PieceCounter()
    schedule = await TextMaker(counter, 0).schedule(plan, "completions", {"ignore_eos": True})
    for planned, request in zip(plan.requests, schedule, strict=True):
        assert await counter.count(str(request.prompt)) == max(planned.prompt_tokens, 9)
        assert request.extra == {"ignore_eos": True}


async def test_conversations_carry_their_history_and_stay_exact() -> None:
    plan = make_plan(replace(WORKLOAD, turns=Turns(3), prefixes=Prefixes(2, 40)))
    counter = PieceCounter()
    schedule = await TextMaker(counter, 0).schedule(plan, "chat", {})
    by_name = {request.name: request for request in schedule}
    systems = set()
    for request in schedule:
        assert request.prompt_tokens == await counter.count(
            [*request.history, Message("user", str(request.prompt))]
        )
        assert request.history[0].role == "system"
        systems.add(request.history[0].content)
        if request.follows:
            before = by_name[request.follows]
            assert request.history[:-2] == before.history
            assert request.history[-2] == Message("user", str(before.prompt))
            assert request.history[-1].role == "assistant"
    assert len(systems) == 2
    assert {await counter.count(text, special=False) for text in systems} == {40}


async def test_shared_blocks_are_the_same_text_and_others_are_not() -> None:
    requests = tuple(
        PlannedRequest(f"r{i}", 0.0, "x", 120, 5, blocks=(Block("one", 40), Block(f"two-{i % 2}", 40)))
        for i in range(3)
    )
    texts = [
        str(request.prompt)
        for request in await TextMaker(PieceCounter(), 0).schedule(Plan(requests), "completions", {})
    ]
    shared = len(texts[0]) - len(texts[0].split("Note", 3)[3])
    assert texts[0][:shared] == texts[2][:shared]
    assert texts[0] != texts[2]
    assert texts[0].split("Note")[1] == texts[1].split("Note")[1]
    assert texts[0].split("Note")[2] != texts[1].split("Note")[2]


async def test_the_seed_decides_the_text() -> None:
    plan = make_plan(WORKLOAD)

    async def digest(seed: int, parallel: int) -> str:
        maker = TextMaker(PieceCounter(), seed, parallel=parallel)
        return schedule_digest(await maker.schedule(plan, "chat", {}))

    assert await digest(0, 1) == await digest(0, 8)
    assert await digest(0, 1) != await digest(1, 1)


async def test_texts_begin_differently() -> None:
    schedule = await TextMaker(PieceCounter(), 0).schedule(make_plan(WORKLOAD), "chat", {})
    assert len({" ".join(str(r.prompt).split()[:2]) for r in schedule}) == len(schedule)
    assert len(set(sentences())) > 150


async def test_approximate_lengths_are_near() -> None:
    maker = TextMaker(ApproximateCounter(), 0)
    schedule = await maker.schedule(make_plan(WORKLOAD), "chat", {})
    assert all(
        len(str(r.prompt).split()) == pytest.approx((r.prompt_tokens or 0) / 1.3, abs=1.5) for r in schedule
    )


async def test_the_server_is_asked_with_its_model() -> None:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.content)
        return httpx.Response(200, json={"count": 5}) if b"good" in request.content else httpx.Response(500)

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
        counter = ServerCounter(http, "m")
        assert await counter.count("good", special=False) == 5
        assert await counter.count([Message("user", "good")]) == 5
        with pytest.raises(FatalError, match="/tokenize"):
            await counter.count("bad")
    assert b'"add_special_tokens":false' in asked[0]
    assert b'"messages":[{"role":"user","content":"good"}]' in asked[1]
    assert all(b'"model":"m"' in body for body in asked)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_ratio_and_overhead_are_read_from_the_usage_of_two_requests(endpoint: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        text = body["prompt"] if endpoint == "completions" else body["messages"][0]["content"]
        return httpx.Response(200, json={"usage": {"prompt_tokens": 30 + 2 * len(text.split())}})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://s") as http:
        counter = await calibrated(http, "m", endpoint, ("one two", "one two three four"))
    assert await counter.count("a b c d e") == 40
    assert await counter.count("a b c d e", special=False) == 10


@pytest.mark.parametrize("body", [{}, {"usage": None}, {"usage": {"prompt_tokens": 5}}])
async def test_without_a_usage_the_usual_ratio_is_taken(body: dict[str, object]) -> None:
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=body))
    async with httpx.AsyncClient(transport=transport, base_url="http://s") as http:
        counter = await calibrated(http, "m", "chat", ("one two", "one two three four"))
    assert await counter.count("a b c d e f g h i j") == 13


async def test_a_tokenizer_file_counts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    counter = FileCounter(file)
    assert await counter.count("one two three") == 3
    assert await counter.count([Message("user", "one two"), Message("user", "three")]) == 3
    with pytest.raises(ConfigError, match="tokenizer"):
        FileCounter(tmp_path / "none.json")
