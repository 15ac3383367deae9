"""The engine's sockets to the workers, one for each life of a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import zmq

from dynamictp.messages import Body
from dynamictp.transport import ZmqLink, worker_address, zmq_link


class WorkerLinks:
    """Owner of the links, by device. A link serves one pair of lives: its sequence numbers begin at 0."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        folder: Path,
        engine_incarnation: int,
    ) -> None:
        self._context = context
        self._poller = poller
        self._folder = folder
        self._engine = engine_incarnation
        self._links: dict[int, tuple[int, ZmqLink]] = {}

    def open(self, device: int, incarnation: int) -> None:
        """Listen for a worker's next life; the link of the one before is closed."""
        self.close(device)
        address = worker_address(self._folder, device, incarnation, self._engine)
        link = zmq_link(self._context, address, bind=True, incarnation=self._engine)
        self._links[device] = (incarnation, link)
        self._poller.register(link.socket, zmq.POLLIN)

    def close(self, device: int, incarnation: int | None = None) -> None:
        """Nothing happens when there is none, or it is another incarnation's."""
        known = self._links.get(device)
        if known is None or incarnation not in (None, known[0]):
            return
        del self._links[device]
        self._poller.unregister(known[1].socket)
        known[1].close()

    def close_all(self) -> None:
        for device in tuple(self._links):
            self.close(device)

    def __iter__(self) -> Iterator[int]:
        """Devices that have a link."""
        return iter(tuple(self._links))

    def receive(self, device: int) -> Body | None:
        """The next message of a device. Raises `ProtocolError`."""
        known = self._links.get(device)
        return known[1].receive() if known is not None else None

    def send(self, device: int, body: Body) -> None:
        """Nothing happens when the device has no link: its worker is gone. Raises `DomainError`."""
        known = self._links.get(device)
        if known is not None:
            known[1].send(body)
