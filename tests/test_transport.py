"""Links: order, waiting, a peer that is gone, and wake-ups that are not lost."""

from __future__ import annotations

import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from dynamictp.errors import DomainError, ProtocolError
from dynamictp.messages import Body, CancelRequest, CloseDomain, ProveDomain
from dynamictp.transport import FIRST_CONTACT_S, Link, MemoryLink, ZmqLink, memory_link_pair, zmq_link

OpenLink = Callable[..., ZmqLink]

MANY = 5000
PATIENCE_S = 30.0
"""Bound for waits that end much earlier unless something is broken."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def address(tmp_path: Path) -> str:
    directory = tmp_path / "links"
    directory.mkdir(mode=0o700)
    return f"ipc://{directory}/w0"


@pytest.fixture
def open_link(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Iterator[OpenLink]:
    """Makes a link at `address`: (bind, incarnation) → link."""
    links: list[ZmqLink] = []

    def make(bind: bool, incarnation: int = 1) -> ZmqLink:
        links.append(zmq_link(context, address, bind=bind, incarnation=incarnation))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture
def zmq_pair(open_link: OpenLink) -> tuple[ZmqLink, ZmqLink]:
    return open_link(True), open_link(False)


@pytest.fixture(params=["zmq", "memory"])
def pair(request: pytest.FixtureRequest) -> tuple[Link, Link]:
    if request.param == "memory":
        return memory_link_pair()
    links: tuple[Link, Link] = request.getfixturevalue("zmq_pair")
    return links


def next_message(link: Link) -> Body:
    assert link.wait(PATIENCE_S)
    message = link.receive()
    assert message is not None
    return message


def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that has no event to wait for."""
    pause = threading.Event()
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        pause.wait(0.001)


# ---------------------------------------------------------------- both kinds


def test_thousands_of_messages_arrive_in_order_in_both_directions(pair: tuple[Link, Link]) -> None:
    left, right = pair
    for epoch in range(MANY):
        left.send(CloseDomain(epoch))
        right.send(ProveDomain(epoch, epoch))
    for epoch in range(MANY):
        assert next_message(right) == CloseDomain(epoch)
        assert next_message(left) == ProveDomain(epoch, epoch)
    assert left.receive() is None
    assert right.receive() is None


def test_a_message_is_encoded_once_and_sent_later(pair: tuple[Link, Link]) -> None:
    left, right = pair
    encoded = [left.encode(CloseDomain(epoch)) for epoch in range(3)]
    assert right.receive() is None
    for data in encoded:
        left.send_encoded(data)
    assert [next_message(right) for _ in encoded] == [CloseDomain(epoch) for epoch in range(3)]


def test_a_message_that_was_encoded_and_not_sent_is_a_gap(pair: tuple[Link, Link]) -> None:
    left, right = pair
    left.encode(CloseDomain(0))
    left.send(CloseDomain(1))
    assert right.wait(PATIENCE_S)
    with pytest.raises(ProtocolError, match="expected message 0, got 1"):
        right.receive()


def test_waiting_ends_when_the_time_is_up(pair: tuple[Link, Link]) -> None:
    left, _right = pair
    for timeout_s in (0.0, 0.02):
        begin = time.monotonic()
        assert not left.wait(timeout_s)
        assert time.monotonic() - begin >= timeout_s - 0.001  # ZeroMQ counts whole milliseconds
    assert left.receive() is None


def test_a_wait_below_a_millisecond_blocks(pair: tuple[Link, Link]) -> None:
    """Else a loop that waits until a deadline spins through its last millisecond."""
    left, _right = pair
    begin = time.monotonic()
    for _ in range(20):
        assert not left.wait(0.0009)
    assert time.monotonic() - begin >= 20 * 0.0002


def test_a_message_that_is_there_ends_a_wait_until_it_is_received(pair: tuple[Link, Link]) -> None:
    left, right = pair
    left.send(CloseDomain(1))
    assert right.wait(PATIENCE_S)
    assert right.wait(0)
    assert right.receive() == CloseDomain(1)
    assert not right.wait(0)


def test_no_wake_up_is_lost_between_threads(pair: tuple[Link, Link]) -> None:
    """Ping-pong: each side sends only after it heard, so one lost wake-up stops both."""
    left, right = pair
    rounds = 2000
    echoed: list[Body] = []

    def echo() -> None:
        for _ in range(rounds):
            echoed.append(next_message(right))
            right.send(echoed[-1])

    thread = threading.Thread(target=echo)
    thread.start()
    for epoch in range(rounds):
        left.send(CloseDomain(epoch))
        assert next_message(left) == CloseDomain(epoch)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert echoed == [CloseDomain(epoch) for epoch in range(rounds)]


# ---------------------------------------------------------------- ZeroMQ


def test_the_socket_lies_in_a_directory_that_only_the_owner_may_enter(
    zmq_pair: tuple[ZmqLink, ZmqLink], address: str
) -> None:
    path = Path(address.removeprefix("ipc://"))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_connecting_end_may_send_before_the_other_exists(open_link: OpenLink) -> None:
    early = open_link(False)
    for epoch in range(MANY):
        early.send(CloseDomain(epoch))
    late = open_link(True)
    for epoch in range(MANY):
        assert next_message(late) == CloseDomain(epoch)


def test_a_bound_end_waits_with_its_first_message_for_a_peer_that_is_starting(open_link: OpenLink) -> None:
    bound, peer = open_link(True), open_link(False)
    bound.send(CloseDomain(1))  # the connection may not stand yet
    assert next_message(peer) == CloseDomain(1)


def test_sending_to_a_peer_that_is_gone_fails_at_once(zmq_pair: tuple[ZmqLink, ZmqLink]) -> None:
    bound, peer = zmq_pair
    peer.send(CloseDomain(0))
    assert next_message(bound) == CloseDomain(0)
    peer.close()

    def refused() -> bool:
        try:
            bound.send(CloseDomain(1))
        except DomainError:
            return True
        return False

    until(refused)
    begin = time.monotonic()
    with pytest.raises(DomainError, match="no peer is connected"):
        bound.send(CloseDomain(1))
    assert time.monotonic() - begin < FIRST_CONTACT_S / 10


def test_a_restarted_peer_is_heard_on_the_same_address(open_link: OpenLink) -> None:
    bound = open_link(True)
    for incarnation in (1, 2):
        peer = open_link(False, incarnation)
        for number in range(3):
            peer.send(CancelRequest(f"r{incarnation}", number))
            assert next_message(bound) == CancelRequest(f"r{incarnation}", number)
        peer.close()


# ---------------------------------------------------------------- memory


def test_the_callbacks_tell_which_end_has_something() -> None:
    heard: list[str] = []
    left, right = memory_link_pair(lambda: heard.append("left"), lambda: heard.append("right"))
    left.send(CloseDomain(1))
    assert heard == ["right"]
    right.send(CloseDomain(2))
    assert heard == ["right", "left"]
    assert left.receive() == CloseDomain(2)


def test_a_callback_finds_the_message_already_there() -> None:
    received: list[Body | None] = []
    left, right = memory_link_pair(on_right=lambda: received.append(right.receive()))
    left.send(CloseDomain(1))
    assert received == [CloseDomain(1)]


def test_a_late_wake_up_of_a_received_message_ends_no_wait() -> None:
    """The receiver may take a message between the sender's append and its wake-up."""
    left, right = memory_link_pair()
    waiting = threading.Event()
    result: list[bool] = []

    def wait() -> None:
        waiting.set()
        result.append(right.wait(0.2))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    while thread.is_alive():
        left._notify()
        thread.join(0.001)
    assert result == [False]


@pytest.mark.parametrize("burst", [1, 7])
def test_a_wait_without_limit_returns_only_with_a_message(burst: int) -> None:
    left, right = memory_link_pair()
    total = 5000 // burst * burst

    def produce() -> None:
        for epoch in range(total):
            left.send(CloseDomain(epoch))

    thread = threading.Thread(target=produce)
    thread.start()
    received = 0
    while received < total:
        assert right.wait(None)
        for taken in range(burst):
            message = right.receive()
            if message is None:
                assert taken > 0, "the wait ended without a message"
                break
            assert message == CloseDomain(received)
            received += 1
    thread.join(PATIENCE_S)
    assert not right.wait(0)


def test_both_ends_are_links() -> None:
    links: tuple[Link, Link] = memory_link_pair()
    for link in links:
        assert isinstance(link, MemoryLink)
        link.close()


def test_a_closed_link_leaves_no_socket_file(open_link: OpenLink, address: str) -> None:
    """A worker whose device is lent out again and again has a socket for each life."""
    file = Path(address.removeprefix("ipc://"))
    ours, theirs = open_link(True), open_link(False)
    ours.send(CloseDomain(1))
    assert stat.S_ISSOCK(file.stat().st_mode)
    theirs.close()
    assert file.exists(), "the end that connects owns no file"
    ours.close()
    assert not file.exists()
