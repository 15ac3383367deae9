"""HTTP and SSE parsing must not depend on where the network cuts the bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.bench.wire import EventParser, ResponseParser, WireError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Dynamictp-TP: 2\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


@given(
    payloads=st.lists(st.binary(min_size=1, max_size=60), max_size=8),
    cuts=st.lists(st.integers(0, 10_000), max_size=40),
)
def test_chunks_come_out_whole_wherever_the_bytes_are_cut(payloads: list[bytes], cuts: list[int]) -> None:
    parser = ResponseParser()
    pieces = [piece for part in cut(CHUNKED + chunked(payloads), cuts) for piece in parser.feed(part)]
    assert pieces == payloads
    assert parser.complete
    assert parser.head is not None
    assert parser.head.headers["x-dynamictp-tp"] == "2"


@given(
    events=st.lists(
        st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30), max_size=8
    ),
    newline=st.sampled_from(["\n", "\r\n"]),
    cuts=st.lists(st.integers(0, 10_000), max_size=40),
)
def test_events_come_out_whole_wherever_the_bytes_are_cut(
    events: list[str], newline: str, cuts: list[int]
) -> None:
    body = "".join(f": ping{newline}event: x{newline}data: {e}{newline}{newline}" for e in events).encode()
    parser = EventParser()
    assert [event for part in cut(body, cuts) for event in parser.feed(part)] == [e.encode() for e in events]


def test_several_data_lines_are_one_event() -> None:
    assert EventParser().feed(b"data: a\ndata:b\n\n: comment\n\n") == [b"a\nb"]


def test_content_length_and_bytewise_arrival() -> None:
    parser = ResponseParser()
    data = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello"
    pieces = [piece for i in range(len(data)) for piece in parser.feed(data[i : i + 1])]
    assert b"".join(pieces) == b"hello"
    assert parser.complete
    assert parser.head is not None
    assert parser.head.status == 404


def test_body_until_close_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(HEAD + b"\r\nab") == [b"ab"]
    assert not parser.complete
    parser.finish()
    assert parser.complete


def test_interim_responses_and_trailers_are_skipped() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED + b"2;ext=1\r\nok\r\n0\r\nT: 1\r\n")
    assert not parser.complete
    parser.feed(b"\r\n")
    assert parser.complete
    assert parser.head is not None
    assert parser.head.status == 200


@pytest.mark.parametrize("cut_at", [10, len(CHUNKED), len(CHUNKED) + 5])
def test_early_close_is_an_error(cut_at: int) -> None:
    parser = ResponseParser()
    parser.feed((CHUNKED + chunked([b"abcdef"]))[:cut_at])
    with pytest.raises(WireError, match="before the response was complete"):
        parser.finish()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-4\r\n",
        CHUNKED + b"2\r\nabcd\r\n",
        b"x" * (65 * 1024),
    ],
)
def test_malformed_responses_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        ResponseParser().feed(data)
