"""Several models in one server, with fake engines: whose request, whose devices, whose figures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamictp.clock import SystemClock
from dynamictp.control.config import ControlConfig
from dynamictp.control.values import Decision, PoolSnapshot, Reason
from dynamictp.errors import ConfigError
from dynamictp.messages import RampSettings, SetDevices, SetLayout
from dynamictp.server import control_plane
from dynamictp.server.service import Service
from dynamictp.server.shares import DeviceShares, Need
from tests.server.models_stack import ModelsStack, running_models
from tests.server.planned_stack import pool_facts

TWO = {"big": "tp2", "small": "tp1"}


@pytest.fixture
async def models() -> AsyncIterator[ModelsStack]:
    async with running_models(TWO) as running:
        yield running


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


# ------------------------------------------------------------ whose request


async def test_a_request_goes_to_the_model_that_it_names(models: ModelsStack) -> None:
    for name in TWO:
        answer = (await models.say(name)).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, name)
        chat = await models.http.post(
            "/v1/chat/completions", json={"model": name, "messages": [{"role": "user", "content": "hi"}]}
        )
        assert chat.json()["choices"][0]["message"]["content"] == name
        tokens = (await models.say(name, "/tokenize")).json()["tokens"]
        text = await models.http.post("/detokenize", json={"model": name, "tokens": tokens})
        assert text.json() == {"prompt": "hi"}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_a_model_that_is_not_here_is_a_404_and_none_a_400(models: ModelsStack, path: str) -> None:
    unknown = await models.say("other", path)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert "'big', 'small'" in unknown.json()["error"]["message"]
    none = await models.say(None, path)
    assert (none.status_code, none.json()["error"]["code"]) == (400, "model_required")
    odd = await models.http.post(path, json={"prompt": "hi", "model": 3})
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "model")


async def test_all_models_are_listed(models: ModelsStack) -> None:
    listed = (await models.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["big", "small"]
    assert (await models.http.get("/v1/models/small")).json()["id"] == "small"
    assert (await models.http.get("/v1/models/other")).status_code == 404


async def test_ready_once_every_model_is() -> None:
    async with running_models(TWO, announce=False) as models:
        models.engines["big"].start()
        await models.roster.pick("big").client.wait_ready()
        waiting = await models.http.get("/ready")
        assert (waiting.status_code, "small" in waiting.json()["error"]["message"]) == (503, True)
        assert (await models.say("big")).status_code == 200
        assert (await models.say("small")).status_code == 503
        models.engines["small"].start()
        await models.roster.pick("small").client.wait_ready()
        ready = await models.http.get("/ready")
        assert ready.json() == {"status": "ready", "layout": "big:tp2+small:tp1"}


# ------------------------------------------------------------ whose devices


async def test_the_layout_names_the_models(models: ModelsStack) -> None:
    state = await models.layout()
    assert state["observed"] == state["target"] == "big:tp2+small:tp1"
    assert [(d["model"], d["tp"], d["devices"]) for d in state["domains"]] == [
        ("big", 2, [0, 1]),
        ("small", 1, [2]),
    ]
    assert [device["model"] for device in state["devices"]] == ["big", "big", "small"]
    assert [(m["name"], m["observed"], m["devices"]) for m in state["models"]] == [
        ("big", "tp2", [0, 1]),
        ("small", "tp1", [2]),
    ]
    assert "small:tp1+small:tp1" in state["legal_layouts"]


async def test_devices_go_from_one_model_to_the_other_and_back(models: ModelsStack) -> None:
    moved = await models.put("big:tp1+small:tp2")
    assert moved.status_code == 200, moved.text
    assert [(s["model"], s["from"], s["to"], s["outcome"]) for s in moved.json()["switches"]] == [
        ("big", "big:tp2", "big:tp1", "closed"),
        ("small", "small:tp1", "small:tp2", "closed"),
    ]
    assert models.held() == {"big": {0}, "small": {1, 2}}
    assert (await models.layout())["observed"] == "big:tp1+small:tp2"
    back = await models.put("big:tp2+small:tp1")
    assert {s["outcome"] for s in back.json()["switches"]} == {"closed"}
    assert models.held()["big"] | models.held()["small"] == {0, 1, 2}
    assert len(models.held()["big"]) == 2
    for name in TWO:
        assert (await models.say(name)).json()["choices"][0]["text"] == name


async def test_a_switch_waits_until_the_other_model_has_left_the_devices(models: ModelsStack) -> None:
    big, small = models.engines["big"], models.engines["small"]
    big.hold_switches = True
    answer = (await models.put("big:tp1+small:tp2", wait="none")).json()
    await until(lambda: any(isinstance(body, SetLayout) for body in big.received))
    assert [(s["model"], s["phase"]) for s in answer["switches"]] == [("big", "decide"), ("small", "devices")]
    assert models.told("small") == []
    again = await models.put("small:tp1")
    assert again.status_code == 409
    lease = await models.http.post("/admin/leases", json={"devices": 1})
    assert "layout is changing" in lease.json()["error"]["message"]
    big.release_switches()
    await until(lambda: models.roster.pick("small").observed == "tp2")
    assert models.told("big")[-1] == SetDevices((1, 2))
    assert [type(body) for body in models.told("small")] == [SetDevices, SetLayout]
    assert models.told("small")[0] == SetDevices((0,))
    assert small.leased == {0}


async def test_when_one_model_stays_the_other_gives_up_waiting(models: ModelsStack) -> None:
    models.engines["big"].hold_switches = True
    answer = (await models.put("big:tp1+small:tp2", wait="none")).json()
    big, small = (switch["id"] for switch in answer["switches"])
    assert (await models.http.delete(f"/admin/switches/{big}")).json()["switch"]["outcome"] == "cancelled"
    board = models.roster.pick("small").switches
    await until(lambda: board.get(small).outcome)
    shown = (await models.http.get(f"/admin/switches/{small}")).json()["switch"]
    assert (shown["outcome"], shown["model"]) == ("failed", "small")
    assert big in shown["error"]
    assert models.held() == {"big": {0, 1}, "small": {2}}
    listed = (await models.http.get("/admin/switches")).json()["switches"]
    assert {switch["id"] for switch in listed} == {big, small}


async def test_a_waiting_switch_can_be_taken_back(models: ModelsStack) -> None:
    models.engines["big"].hold_switches = True
    answer = (await models.put("big:tp1+small:tp2", wait="none")).json()
    small = answer["switches"][1]["id"]
    assert (await models.http.delete(f"/admin/switches/{small}")).json()["switch"]["outcome"] == "cancelled"
    models.engines["big"].release_switches()
    await until(lambda: models.held() == {"big": {0}, "small": {2}})
    assert not [body for body in models.told("small") if isinstance(body, SetLayout)]
    # Nobody wants device 1 now; an engine says so four times a second.
    small_engine = models.engines["small"]
    small_engine.link.send(small_engine.snapshot())
    lease = await models.http.post("/admin/leases", json={"devices": 1})
    assert lease.json()["devices"] == [1]
    refused = await models.put("big:tp2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "devices_leased")


async def test_placed_layouts(models: ModelsStack) -> None:
    assert (await models.put("big:tp1@0+small:tp1@2")).status_code == 200
    assert models.held() == {"big": {0}, "small": {2}}
    assert (await models.put("big:tp1@1")).status_code == 200
    assert models.held() == {"big": {1}, "small": {2}}
    assert (await models.put("small:tp2@0,2")).status_code == 200
    assert models.held() == {"big": {1}, "small": {0, 2}}


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("tp1", "names no model"),
        ("other:tp1", "no model of this server"),
        ("big:tp3", "degree 1, 2"),
        ("big:tp2+small:tp2", "big 2, small 2 devices; the pool has 3"),
        ("small:tp2", "small 2, big 2 devices"),
        ("big:tp2@0,2", "device 2 is in use by small"),
        ("big:tp2@1,2+small:tp1@0", "wait for each other"),
        ("big:tp1@7", "the pool has 0 to 2"),
        ("big:tp2pp2", "pipeline"),
        ("big:tp1@0+small:tp1@0", "two domains"),
        ("auto ish", "is no shape"),
    ],
)
async def test_impossible_layouts_are_refused(models: ModelsStack, layout: str, said: str) -> None:
    refused = await models.put(layout)
    assert refused.status_code == 422, refused.text
    assert said in refused.json()["error"]["message"]
    assert "big:tp2" in refused.json()["error"]["legal_layouts"]
    assert models.told("big") == models.told("small") == []


@pytest.mark.parametrize("layouts", [("big:tp2", "small:tp2"), ("big:tp1@2", "small:tp1@2")])
async def test_of_two_orders_that_wait_for_the_same_lease_the_second_is_refused(
    layouts: tuple[str, str],
) -> None:
    async with running_models({"big": "tp1", "small": "tp1"}, mode="dynamic") as models:
        for engine in models.engines.values():
            engine.hold_switches = True
        lease = (await models.http.post("/admin/leases", json={"devices": 1})).json()
        assert lease["devices"] == [2]
        orders = [asyncio.create_task(models.put(layout, wait="none")) for layout in layouts]
        await until(lambda: models.roster.shares.pool.leases[0].state == "revoking")
        await asyncio.sleep(0.01)
        assert not any(order.done() for order in orders)
        await models.http.delete(f"/admin/leases/{lease['id']}")
        first, second = [await order for order in orders]
        assert (first.status_code, second.status_code) == (202, 422)
        assert "big:tp2" in second.json()["error"]["legal_layouts"]
        board = models.roster.pick("small").switches
        assert (board.in_flight, board.pinned, board.wanted) == (None, False, None)
        # Asked for afterwards, while the first is under way, it is refused as well.
        assert (await models.put(layouts[1], wait="none")).status_code == 422


async def test_first_layouts_must_fit_together() -> None:
    with pytest.raises(ConfigError, match="take big 2, small 2 devices; the pool has 3"):
        async with running_models({"big": "tp2", "small": "tp2"}):
            pass
    with pytest.raises(ConfigError, match="each may be in one layout only"):
        async with running_models({"big": "tp2@0,1", "small": "tp1@1"}):
            pass
    async with running_models({"big": "tp1", "small": "tp2@0,1"}) as models:
        assert models.held() == {"big": {2}, "small": {0, 1}}


async def test_a_model_that_has_failed_leaves_its_devices_to_the_other(models: ModelsStack) -> None:
    small = models.roster.pick("small")
    small.client.fail_all("too many crashes")
    small.share.leave()
    assert (await models.say("small")).status_code == 503
    assert (await models.say("big")).status_code == 200
    assert "small" in (await models.http.get("/ready")).json()["error"]["message"]
    assert (await models.put("big:tp1@2")).status_code == 200
    assert (await models.put("small:tp1")).status_code == 503


async def test_the_engine_of_one_is_lost(models: ModelsStack) -> None:
    """Its devices stay its own until the next engine says what it uses."""
    small = models.roster.pick("small")
    small.client.detach()
    small.engine_lost()
    assert (await models.put("big:tp1")).status_code == 200
    assert models.held() == {"big": {0}, "small": {2}}
    assert (await models.say("big")).status_code == 200


# ------------------------------------------------------------ planners


class Wishes:
    """What each model's planner says, and what it sees."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, planes: dict[str, Any]) -> None:
        self.seen: dict[str, PoolSnapshot] = {}
        self.target: dict[str, str] = {}
        self.reserve: dict[str, int] = {}
        books = {id(plane._cost): name for name, plane in planes.items()}

        def decide(seen: PoolSnapshot, state: Any, config: Any, cost: Any) -> tuple[Decision, Any]:
            name = books[id(cost)]
            self.seen[name] = seen
            wanted = self.target.get(name, seen.layout)
            target = None if wanted == seen.layout or seen.pinned else wanted
            reason = Reason.GROW_PREDICTED if target else Reason.HOLD
            devices = self.reserve.get(name, 1)
            return Decision(
                seen.time_s, target, reason, wanted, reason, 1, reserve=devices, forced=True
            ), state

        monkeypatch.setattr(control_plane, "decide", decide)


async def test_planners_share_the_pool_by_priority(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_models(TWO, mode="dynamic", priorities={"small": 1}) as models:
        planes = {s.model: s.plan_with(pool_facts(), ControlConfig()) for s in models.roster.services}
        wishes = Wishes(monkeypatch, planes)

        async def tick() -> None:
            for plane in planes.values():
                await plane.tick()

        wishes.reserve = {"big": 2, "small": 1}
        await tick()
        await tick()
        assert {name: seen.devices_available for name, seen in wishes.seen.items()} == {"big": 2, "small": 1}
        # The model of higher priority wants another device: the other one has to see that it must leave.
        wishes.reserve["small"], wishes.target["small"] = 2, "tp2"
        await tick()
        await tick()
        assert wishes.seen["big"].devices_available == 1
        assert wishes.seen["small"].devices_available == 1
        assert models.roster.pick("small").observed == "tp1"
        wishes.reserve["big"], wishes.target["big"] = 1, "tp1"
        await tick()
        await until(lambda: models.roster.pick("big").observed == "tp1")
        await until(lambda: len(models.held()["small"]) == 2)
        await tick()
        await until(lambda: models.roster.pick("small").observed == "tp2")
        # Now the one of lower priority wants more, in vain; then the other needs less.
        wishes.reserve["big"], wishes.target["big"] = 2, "tp2"
        await tick()
        assert wishes.seen["small"].devices_available == 2
        assert models.roster.pick("big").observed == "tp1"
        wishes.reserve["small"], wishes.target["small"] = 1, "tp1"
        await tick()
        await until(lambda: models.roster.pick("small").observed == "tp1")
        await until(lambda: len(models.held()["big"]) == 2)
        await tick()
        await until(lambda: models.roster.pick("big").observed == "tp2")
        decided = (await models.http.get("/admin/decisions?last=4")).json()["decisions"]
        assert {decision["model"] for decision in decided} == {"big", "small"}
        of_one = (await models.http.get("/admin/decisions?model=big")).json()["decisions"]
        assert {decision["model"] for decision in of_one} == {"big"}
        said = [line for line in caplog.messages if "decision: " in line]
        assert {line.partition(" ")[0] for line in said} == {"model=big", "model=small"}
        assert (await models.http.get("/admin/journal")).status_code == 400
        assert (await models.http.get("/admin/journal?model=small")).status_code == 200


async def test_a_pinned_model_keeps_its_devices_whatever_the_others_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_models(TWO, mode="dynamic", priorities={"small": 1}) as models:
        planes = {s.model: s.plan_with(pool_facts(), ControlConfig()) for s in models.roster.services}
        wishes = Wishes(monkeypatch, planes)
        assert (await models.put("big:tp2")).status_code == 200
        assert [m["pinned"] for m in (await models.layout())["models"]] == [True, False]
        wishes.reserve, wishes.target = {"big": 1, "small": 2}, {"small": "tp2"}
        for _ in range(3):
            for plane in planes.values():
                await plane.tick()
        assert {name: len(held) for name, held in models.held().items()} == {"big": 2, "small": 1}
        assert wishes.seen["big"].devices_available == 2
        refused = await models.put("small:tp2")
        assert refused.status_code == 422
        assert (await models.put("auto")).status_code == 200
        for plane in planes.values():
            await plane.tick()
        for plane in planes.values():
            await plane.tick()
        assert wishes.seen["big"].devices_available == 1


async def test_ramps_ordered_by_hand_go_by_the_parameters_in_force() -> None:
    async with running_models(TWO, mode="dynamic") as models:
        for service in models.roster.services:
            service.plan_with(pool_facts(), ControlConfig())
        await models.http.put("/admin/config", json={"ramp_observe_s": 1.5})
        assert (await models.put("big:tp1+small:tp2", ramp=True, drain_deadline_s=7)).status_code == 200
        for name in TWO:
            (command,) = (body for body in models.told(name) if isinstance(body, SetLayout))
            assert command.settings == RampSettings(observe_s=1.5)
            wanted = models.roster.pick(name).switches.wanted
            assert wanted is not None
            assert (wanted.ramp, wanted.drain_deadline_s) == (True, 7.0)


# ------------------------------------------------------------ whose figures


async def test_series_carry_the_model_and_the_machine_does_not(models: ModelsStack) -> None:
    await models.say("small")
    text = (await models.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    running = families["dtp_num_requests_running"].samples
    assert [sample.labels for sample in running] == [{"model_name": "big"}, {"model_name": "small"}]
    tokens = {s.labels["model_name"]: s.value for s in families["dtp_generation_tokens"].samples}
    assert tokens.keys() == {"small"}
    assert [s.labels for s in families["dtp_node_memory_bytes"].samples] == [
        {"kind": "total"},
        {"kind": "available"},
    ]
    assert sum(sample.value for sample in families["dtp_devices"].samples) == 3
    names = [(s.name, *sorted(s.labels.items())) for family in families.values() for s in family.samples]
    assert len(names) == len(set(names))
    assert text.count("# TYPE dtp_num_requests_running ") == 1


async def test_history_is_of_one_model(models: ModelsStack) -> None:
    first = (await models.http.get("/admin/history")).json()
    assert (first["model"], first["models"]) == ("big", ["big", "small"])
    assert (await models.http.get("/admin/history?model=small")).json()["model"] == "small"
    assert (await models.http.get("/admin/history?model=other")).status_code == 404
    assert (await models.http.get("/dashboard")).status_code == 200


# ------------------------------------------------------------ the division itself


class Stub:
    """A model that is not there."""

    def __init__(self, need: Need) -> None:
        self.now = need
        self.changing = False
        self.sent: list[object] = []

    def need(self) -> Need:
        return self.now

    def send(self, body: object) -> bool:
        self.sent.append(body)
        return True

    def gained(self) -> None:
        self.sent.append("more")


def test_the_only_model_has_all_that_is_not_leased() -> None:
    shares = DeviceShares(4, SystemClock(), revocable=True)
    stub = Stub(Need(1))
    share = shares.join("one", stub)
    shares.begin()
    assert (share.available, share.reach, share.excluded) == (4, 4, ())
    share.unsettled = False
    lease = shares.pool.lease(1, "standby", notice_s=1, grace_s=1)
    shares.devices_changed()
    assert (share.available, share.reach, share.excluded) == (3, 3, (3,))
    shares.pool.give_back(lease.id)
    shares.devices_changed()
    assert stub.sent[-2:] == [SetDevices(()), "more"]
    assert isinstance(shares.share("one").holder, Stub | Service)
