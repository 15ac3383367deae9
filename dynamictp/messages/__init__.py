"""Every message between server, engine and workers: small frozen values, encoded with MessagePack.

An `Envelope` carries protocol version, sender's incarnation and a gap-free sequence number; its body is one
of the structs here. Fields are only ever appended. Times are seconds of the machine's monotonic clock.
Token lists travel as bytes (`pack_tokens`): little-endian uint32.

Positions: `position` counts output tokens of a request from 0, across preemption, handover and engine
restart. Absolute positions in the sequence (prompt + output) are called `start` or `index`.
"""

from __future__ import annotations

import msgspec

from dynamictp.messages.serving import (
    CancelRequest,
    CancelSwitch,
    EngineReady,
    FirstAdmission,
    Outputs,
    PromptLogprobs,
    Queued,
    RequestEnd,
    SetDevices,
    SetLayout,
    Shutdown,
    Snapshot,
    StepMeasure,
    StepTotals,
    SubmitRequest,
    SwitchStatus,
    TokenEvent,
    Waiting,
    WorkerGone,
    WorkerLost,
    WorkerStarted,
)
from dynamictp.messages.start import (
    ArenaFacts,
    EngineStart,
)
from dynamictp.messages.values import (
    DeviceStatus,
    DomainStatus,
    RampSettings,
    SamplingParams,
    ServedBy,
    TokenLogprobs,
    pack_tokens,
    unpack_tokens,
)
from dynamictp.messages.work import (
    NO_TOKEN,
    CloseDomain,
    CommHandle,
    DomainBroken,
    DomainClosed,
    DomainOpened,
    DomainProven,
    NewRow,
    OpenDomain,
    ProveDomain,
    RowPromptLogprobs,
    RowStep,
    RowToken,
    StepPlan,
    StepResult,
    WorkerHello,
)

__all__ = [
    "NO_TOKEN",
    "PROTOCOL_VERSION",
    "ArenaFacts",
    "Body",
    "CancelRequest",
    "CancelSwitch",
    "CloseDomain",
    "CommHandle",
    "DeviceStatus",
    "DomainBroken",
    "DomainClosed",
    "DomainOpened",
    "DomainProven",
    "DomainStatus",
    "EngineReady",
    "EngineStart",
    "Envelope",
    "FirstAdmission",
    "NewRow",
    "OpenDomain",
    "Outputs",
    "PromptLogprobs",
    "ProveDomain",
    "Queued",
    "RampSettings",
    "RequestEnd",
    "RowPromptLogprobs",
    "RowStep",
    "RowToken",
    "SamplingParams",
    "ServedBy",
    "SetDevices",
    "SetLayout",
    "Shutdown",
    "Snapshot",
    "StepMeasure",
    "StepPlan",
    "StepResult",
    "StepTotals",
    "SubmitRequest",
    "SwitchStatus",
    "TokenEvent",
    "TokenLogprobs",
    "Waiting",
    "WorkerGone",
    "WorkerHello",
    "WorkerLost",
    "WorkerStarted",
    "pack_tokens",
    "unpack_tokens",
]

PROTOCOL_VERSION = 1

Body = (
    SubmitRequest
    | CancelRequest
    | SetLayout
    | CancelSwitch
    | SetDevices
    | Shutdown
    | WorkerGone
    | WorkerStarted
    | EngineReady
    | Outputs
    | SwitchStatus
    | FirstAdmission
    | Snapshot
    | WorkerLost
    | OpenDomain
    | ProveDomain
    | CloseDomain
    | StepPlan
    | WorkerHello
    | DomainOpened
    | DomainProven
    | DomainClosed
    | StepResult
    | DomainBroken
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message on the wire. `sequence` starts at 0 and has no gap within one sender's incarnation."""

    version: int
    incarnation: int
    sequence: int
    body: Body
