"""What `GET /admin/layout` and the switches' endpoints show, of one model or of several."""

from __future__ import annotations

from typing import Any

from dynamictp.control.pool import DeviceState
from dynamictp.layout import legal_specs
from dynamictp.messages import DeviceStatus, DomainStatus
from dynamictp.server.layout_orders import degrees_of
from dynamictp.server.model_layouts import joined, of_model
from dynamictp.server.roster import Roster
from dynamictp.server.service import DeviceInfo, Service
from dynamictp.server.switches import describe

_OF_EACH = ("observed", "target", "pinned", "waiting", "switch")
"""What `models` repeats of each."""


def show_layout(roster: Roster) -> dict[str, Any]:
    """The body of `GET /admin/layout`. With several models layouts name them, and each has an entry of its
    own under `models`."""
    if not roster.several:
        service = roster.first
        return {
            **_show_model(service, named=False),
            "domains": _domains(service),
            "devices": _show_devices(roster),
        }
    every = {service.model: _show_model(service, named=True) for service in roster.services}
    models = {service.model: every[service.model] for service in roster.living}
    each = models.values()
    return {
        "mode": roster.first.mode,
        "pinned": any(model["pinned"] for model in each),
        "target": joined({name: model["target"] for name, model in models.items()}),
        "observed": joined({name: model["observed"] for name, model in models.items()}),
        "legal_layouts": [of_model(text, name) for name, m in models.items() for text in m["legal_layouts"]],
        "waiting": sum(model["waiting"] for model in each),
        "switch": next((model["switch"] for model in each if model["switch"]), None),
        "barred": [
            {**bar, "layout": of_model(bar["layout"], name)}
            for name, m in models.items()
            for bar in m["barred"]
        ],
        "domains": [domain for service in roster.living for domain in _domains(service)],
        "devices": _show_devices(roster),
        "models": [
            {
                "name": service.model,
                "priority": service.share.priority,
                "devices": sorted(service.share.held),
                "max_devices": service.share.most,
                "ready": service.client.is_ready,
                "failure": service.client.failure,
                **{key: every[service.model][key] for key in _OF_EACH},
            }
            for service in roster.services
        ],
    }


def observed_of(roster: Roster) -> str:
    """The layout in force; it names the models where there are several."""
    if not roster.several:
        return roster.first.observed
    return joined({service.model: service.observed for service in roster.living})


def show_switch(roster: Roster, service: Service, switch_id: str) -> dict[str, object]:
    """A switch; with several models it says whose, and its layouts do too. Raises `NotFound`."""
    board = service.switches
    shown = describe(board.get(switch_id), board.times(switch_id))
    return _with_model(shown, service) if roster.several else shown


def show_switches(roster: Roster) -> list[dict[str, object]]:
    """All that are remembered, the latest first."""
    found = [
        (board.times(status.switch_id), show_switch(roster, service, status.switch_id))
        for service in roster.services
        for board in (service.switches,)
        for status in board.known
    ]
    if roster.several:
        found.sort(key=lambda entry: -entry[0].began if entry[0] is not None else 0.0)
    return [shown for _, shown in found]


def _with_model(shown: dict[str, object], service: Service) -> dict[str, object]:
    name = service.model
    both = {key: of_model(str(shown[key]), name) for key in ("from", "to")}
    return {**shown, **both, "model": name}


def _show_model(service: Service, *, named: bool) -> dict[str, Any]:
    """What is one model's own, with layouts that don't name it, but for the switch where it is `named`."""
    snapshot, board, plane = service.client.snapshot, service.switches, service.plane
    in_flight = board.in_flight
    switch = None
    if in_flight is not None:
        switch = describe(in_flight, board.times(in_flight.switch_id))
        switch = _with_model(switch, service) if named else switch
    return {
        "mode": service.mode,
        "pinned": board.pinned,
        "target": board.target or service.observed,
        "observed": service.observed,
        "legal_layouts": [str(spec) for spec in legal_specs(degrees_of(service), service.share.most)],
        "waiting": snapshot.waiting if snapshot else 0,
        "switch": switch,
        "barred": [
            {"layout": bar.layout, "for_s": bar.until_s - service.clock.now()}
            for bar in (plane.reconciler.bars() if plane is not None else ())
        ],
    }


def _domains(service: Service) -> list[dict[str, Any]]:
    snapshot = service.client.snapshot
    return [_domain(domain, service.model) for domain in snapshot.domains] if snapshot else []


def _domain(domain: DomainStatus, model: str) -> dict[str, Any]:
    return {
        "id": domain.id,
        "epoch": domain.epoch,
        "model": domain.model or model,
        "tp": domain.tp,
        "pp": domain.pp,
        "devices": domain.devices,
        "state": domain.state,
        "running": domain.running,
        "kv_pages_used": domain.kv_pages_used,
        "kv_pages_cap": domain.kv_pages_cap,
    }


def _show_devices(roster: Roster) -> list[dict[str, Any]]:
    """Each as the engine of the model says that may use it; of one that no model has, any engine's word will
    do."""
    shares, pool = roster.shares, roster.shares.pool
    states = shares.desk.states()
    leases = {device: lease.id for lease in pool.leases for device in lease.devices}
    shown = []
    for device in pool.devices:
        holder = shares.holder_of(device)
        service = roster.pick(holder.name) if holder is not None else roster.living[0]
        snapshot = service.client.snapshot
        if snapshot is None:
            continue
        status = next(entry for entry in snapshot.devices if entry.id == device)
        info = service.device_info().get(device, DeviceInfo())
        entry = _device(status, snapshot.domains, info, states[device], leases.get(device))
        if roster.several:
            entry["model"] = holder.name if holder is not None else None
        shown.append(entry)
    return shown


def _device(
    device: DeviceStatus,
    domains: tuple[DomainStatus, ...],
    info: DeviceInfo,
    state: DeviceState,
    lease: str | None,
) -> dict[str, Any]:
    """`domain` is the one that takes new requests, when a draining one shares the device."""
    serving = {domain.id for domain in domains if domain.state == "serving"}
    chosen = next((d for d in device.domains if d in serving), device.domains[0] if device.domains else None)
    return {
        "id": device.id,
        "cores": info.cores,
        "pid": info.pid,
        "domain": chosen,
        "domains": device.domains,
        "state": state,
        "lease": lease,
    }
