"""Messages: every one survives the wire, and the wire format only grows at the end."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from dynamictp import messages
from dynamictp.errors import ProtocolError
from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.messages import (
    PROTOCOL_VERSION,
    Body,
    CloseDomain,
    Envelope,
    RowStep,
    StepPlan,
    pack_tokens,
    unpack_tokens,
)
from dynamictp.transport import Codec

BODIES: tuple[type[msgspec.Struct], ...] = get_args(Body)
FACTS = ModelFacts(
    family="llama", layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    vocab=49152, max_context=8192, norm_eps=1e-5, rope=RopeFacts(theta=100_000.0),
)  # fmt: skip


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of a type that messages use. A type that is not listed here fails the test: list it."""
    scalars: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
        inspect.IntType: st.integers(-(2**63), 2**64 - 1),
        inspect.FloatType: st.floats(allow_nan=False, allow_infinity=False),
        inspect.StrType: st.text(max_size=8),
        inspect.BytesType: st.binary(max_size=8),
        inspect.BoolType: st.booleans(),
        inspect.NoneType: st.none(),
    }
    return scalars[type(kind)] if type(kind) in scalars else composite_values(kind)


def composite_values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    result: st.SearchStrategy[Any]
    match kind:
        case inspect.StructType(cls=cls) if cls is ModelFacts:
            result = st.just(FACTS)
        case inspect.StructType(cls=cls, fields=fields):
            result = st.builds(cls, **{field.name: values(field.type) for field in fields})
        case inspect.VarTupleType(item_type=item):
            result = st.lists(values(item), max_size=3).map(tuple)
        case inspect.TupleType(item_types=items):
            result = st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            result = st.dictionaries(values(key), values(value), max_size=3)
        case inspect.UnionType(types=types):
            result = st.one_of(*map(values, types))
        case inspect.LiteralType(values=literals):
            result = st.sampled_from(literals)
        case _:
            raise TypeError(f"no strategy for {kind}")
    return result


def any_of(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return values(inspect.type_info(struct))


ANY_BODY = st.one_of(*map(any_of, BODIES))


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("struct", BODIES, ids=lambda struct: struct.__name__)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_survives_the_wire(struct: type[msgspec.Struct], data: st.DataObject) -> None:
    body = data.draw(any_of(struct))
    received = Codec(1).decode(Codec(7).encode(body))
    assert type(received) is struct
    assert received == body


@settings(max_examples=25)
@given(any_of(messages.EngineStart))
def test_the_start_values_of_an_engine_survive_a_file(start: messages.EngineStart) -> None:
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(start), type=messages.EngineStart) == start


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_are_little_endian_uint32(tokens: list[int]) -> None:
    data = pack_tokens(tokens)
    assert data == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(data) == tokens


def test_token_bytes_that_are_cut_off_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"\0\0\0\0\0")
    with pytest.raises(OverflowError):
        pack_tokens([-1])


def test_defaults_are_not_shared() -> None:
    first, second = (messages.SwitchStatus("s1", "tp1", "tp2", "prepare") for _ in range(2))
    first.phases_ms["proof"] = 1.0
    assert second.phases_ms == {}


# ---------------------------------------------------------------- refusals


def wire(
    body: object = ("CloseDomain", 3),
    *,
    version: int = PROTOCOL_VERSION,
    incarnation: int = 1,
    sequence: int = 0,
) -> bytes:
    return msgspec.msgpack.encode((version, incarnation, sequence, body))


def test_the_bytes_of_a_message() -> None:
    assert Codec(1).encode(CloseDomain(3)) == wire() == bytes.fromhex("94010100 92 ab") + b"CloseDomain\x03"


@pytest.mark.parametrize(
    "body",
    [
        ("NoSuchMessage", 3),
        ("CloseDomain",),
        ("CloseDomain", "3"),
        ("SetLayout", "s1", "tp2", "no such phase"),
        (3,),
        (),
        None,
        {"CloseDomain": 3},
    ],
)
def test_an_unknown_or_malformed_body_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError, match="not a message of protocol 1"):
        Codec(1).decode(wire(body))


@given(st.binary(max_size=60))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Codec(1).decode(data)


@given(ANY_BODY, st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_damaged_messages_are_refused_or_decode_to_a_message(body: Body, data: st.DataObject) -> None:
    """There is no other outcome, such as an exception of another kind."""
    good = Codec(1).encode(body)
    index = data.draw(st.integers(0, len(good) - 1))
    damaged = good[:index] + bytes([data.draw(st.integers(0, 255))]) + good[index + 1 :]
    for received in (damaged, good[:index]):
        try:
            assert isinstance(Codec(1).decode(received), BODIES)
        except ProtocolError:
            continue


def test_text_that_is_not_utf8_and_deep_nesting_are_refused() -> None:
    with pytest.raises(ProtocolError):
        Codec(1).decode(wire(("CancelSwitch", "??")).replace(b"??", b"\xff\xfe"))
    deep = wire()[:1].replace(b"\x94", b"\x95") + wire()[1:] + b"\x91" * 100_000 + b"\x00"
    with pytest.raises(ProtocolError):
        Codec(1).decode(deep)


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_another_protocol_version_is_refused(version: int) -> None:
    with pytest.raises(ProtocolError, match=f"peer speaks protocol {version}, this is {PROTOCOL_VERSION}"):
        Codec(1).decode(wire(version=version))


# ---------------------------------------------------------------- sequence and incarnation


@given(st.lists(ANY_BODY, max_size=5))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_messages_arrive_in_order(bodies: list[Body]) -> None:
    sender, receiver = Codec(3), Codec(1)
    assert [receiver.decode(data) for data in map(sender.encode, bodies)] == bodies


@given(st.integers(0, 6), st.integers(0, 9))
def test_anything_but_the_next_message_is_refused(received: int, sequence: int) -> None:
    codec = Codec(1)
    for number in range(received):
        codec.decode(wire(sequence=number))
    if sequence == received:
        codec.decode(wire(sequence=sequence))
    else:
        with pytest.raises(ProtocolError, match=f"expected message {received}, got {sequence}"):
            codec.decode(wire(sequence=sequence))


def test_a_gap_stays_a_gap() -> None:
    codec = Codec(1)
    codec.decode(wire(sequence=0))
    for sequence in (2, 3):
        with pytest.raises(ProtocolError):
            codec.decode(wire(sequence=sequence))


def test_a_message_that_could_not_be_encoded_leaves_no_gap() -> None:
    sender, receiver = Codec(1), Codec(1)
    with pytest.raises(OverflowError):
        sender.encode(CloseDomain(2**64))
    assert receiver.decode(sender.encode(CloseDomain(1))) == CloseDomain(1)


def test_a_restarted_peer_begins_at_zero_and_the_old_one_is_heard_no_more() -> None:
    codec = Codec(1)
    for sequence in range(3):
        codec.decode(wire(incarnation=4, sequence=sequence))
    assert codec.decode(wire(incarnation=6, sequence=0)) == CloseDomain(3)
    with pytest.raises(ProtocolError, match="incarnation 4 after 6"):
        codec.decode(wire(incarnation=4, sequence=3))
    assert codec.decode(wire(incarnation=6, sequence=1)) == CloseDomain(3)
    with pytest.raises(ProtocolError, match="expected message 0, got 2"):
        codec.decode(wire(incarnation=7, sequence=2))


# ---------------------------------------------------------------- the wire format only grows at the end

GOLDEN: dict[str, str] = {
    "SamplingParams": "seed max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty "
    "repetition_penalty min_tokens stop_ids logprobs prompt_logprobs logit_bias",
    "TokenLogprobs": "token logprob top",
    "ServedBy": "domain tp tp_min tp_max handovers recomputes",
    "DomainStatus": "id epoch model tp pp devices state running kv_pages_used kv_pages_cap tokens_total",
    "DeviceStatus": "id state domains kv_pages_used kv_pages_total busy_s",
    "SubmitRequest": "request_id attempt tokens prompt_len sampling arrival_s pool model tenant priority "
    "request_class deadline_s salt",
    "CancelRequest": "request_id attempt",
    "SetLayout": "switch_id layout phase pool ramp drain_deadline_s reason",
    "CancelSwitch": "switch_id",
    "Shutdown": "drain_s",
    "EngineReady": "layout arena_pages max_model_len legal_degrees",
    "TokenEvent": "request_id attempt position token served logprobs",
    "RequestEnd": "request_id attempt reason tokens cached_tokens error",
    "PromptLogprobs": "request_id attempt start entries",
    "Outputs": "tokens ends prompts",
    "SwitchStatus": "switch_id from_layout to_layout phase outcome phases_ms handovers recomputes "
    "weight_bytes_copied reason error",
    "FirstAdmission": "switch_id milliseconds",
    "Snapshot": "time_s layout waiting running rows_used domains devices pages_free pages_cached pages_total "
    "prefix_hits prefix_queries preemptions max_model_len step_engine_us steps",
    "StepTotals": "tp phase steps seconds weights_s attention_s wait_s host_s",
    "WorkerLost": "device incarnation reason",
    "WorkerGone": "device incarnation reason",
    "WorkerStarted": "device incarnation",
    "CommHandle": "id slot",
    "OpenDomain": "epoch model tp rank members comm control_slot pp",
    "ProveDomain": "epoch step",
    "CloseDomain": "epoch",
    "NewRow": "row request_id attempt tokens prompt_len sampling blocks",
    "RowStep": "row start count sample new_blocks prompt_logprobs",
    "StepPlan": "epoch step rows new gone",
    "WorkerHello": "device incarnation pid",
    "DomainOpened": "epoch rank views_ms communicator_ms weight_bytes_copied",
    "DomainProven": "epoch rank proof_ms",
    "DomainClosed": "epoch rank",
    "RowToken": "row index token logprobs",
    "RowPromptLogprobs": "row start entries",
    "StepResult": "epoch step tokens seconds wait_s prompts weights_s attention_s gap_s",
    "DomainBroken": "epoch rank step culprit error",
    "ArenaFacts": "pages page_tokens dtype",
    "EngineStart": "facts arena devices layout legal_degrees model mode max_model_len max_num_seqs "
    "max_batched_tokens max_step_ms prefix_cache comm_slots incarnation hang_s workers",
    "Envelope": "version incarnation sequence body",
}
"""Fields of every struct in their order on the wire. Only ever append here, in step with `messages`."""


def structs() -> dict[str, type[msgspec.Struct]]:
    return {
        name: struct
        for name, struct in vars(messages).items()
        if isinstance(struct, type)
        and issubclass(struct, msgspec.Struct)
        and struct.__module__.startswith(messages.__name__)
        and not name.startswith("_")
    }


def test_no_message_was_removed() -> None:
    assert set(GOLDEN) <= set(structs())


@pytest.mark.parametrize("name", GOLDEN)
def test_fields_are_only_appended_and_then_have_a_default(name: str) -> None:
    """A sender of before leaves appended fields out; so a field without default may not be appended."""
    struct = structs()[name]
    golden = tuple(GOLDEN[name].split())
    assert struct.__struct_fields__[: len(golden)] == golden
    appended = inspect.type_info(struct).fields[len(golden) :]  # type: ignore[attr-defined]
    assert not [field.name for field in appended if field.required]


def test_every_body_is_tagged_with_its_name_and_frozen() -> None:
    assert len(BODIES) == 24
    for struct in BODIES:
        assert struct.__struct_config__.tag == struct.__name__
    for name, struct in structs().items():
        assert struct.__struct_config__.frozen, name


def test_a_receiver_accepts_fewer_and_more_fields_within_a_version() -> None:
    rows = ((0, 5, 1, True),)
    assert Codec(1).decode(wire(("StepPlan", 1, 2, rows))) == StepPlan(1, 2, (RowStep(0, 5, 1, True),))
    assert Codec(1).decode(wire(("CloseDomain", 3, "of a later release"))) == CloseDomain(3)


def test_an_envelope_takes_few_bytes() -> None:
    """A decode step of 16 rows is sent to every rank at every step: field names don't travel."""
    plan = StepPlan(3, 1000, tuple(RowStep(row, 1000 + row, 1, True) for row in range(16)))
    assert len(msgspec.msgpack.encode(Envelope(PROTOCOL_VERSION, 1, 1000, plan))) < 16 * 12
