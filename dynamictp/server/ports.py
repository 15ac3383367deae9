"""The ports of a server: the API's, and one for the admin interface if it has its own."""

from __future__ import annotations

import asyncio
import signal

from dynamictp.config import ServeConfig, is_loopback
from dynamictp.server.access import Access, host_names
from dynamictp.server.app import create_app
from dynamictp.server.keys import KeyRings
from dynamictp.server.machine import raise_descriptor_limit
from dynamictp.server.roster import Roster
from dynamictp.server.run import CONNECTIONS, ServerRunner
from dynamictp.server.service import Service

ADMIN_CONNECTIONS = 256
OTHER_DESCRIPTORS = 512
"""For the admin port, and for pipes, sockets and files of the server itself."""
LEAST_CONNECTIONS = 64


class Ports:
    """Owner of the listening applications.

    SIGHUP reads the key files again. Without any it keeps its meaning: a closed terminal ends the server.
    """

    def __init__(self, config: ServeConfig, served: Service | Roster, keys: KeyRings) -> None:
        self._keys = keys
        api, admin = keys.api, keys.admin
        names = host_names(*config.allowed_hosts.split(","), "" if is_loopback(config.host) else config.host)
        main = create_app(
            served,
            admin=config.admin_on_main,
            access=Access(api, admin, config.public_metrics, names),
        )
        most = max(LEAST_CONNECTIONS, min(CONNECTIONS, raise_descriptor_limit() - OTHER_DESCRIPTORS))
        self._runners = [ServerRunner(main, config.host, config.port, connections=most)]
        if config.admin_address is not None:
            own = create_app(served, api=False, access=Access(admin, admin, names=names))
            address = config.admin_address
            self._runners.append(ServerRunner(own, *address, connections=ADMIN_CONNECTIONS))

    async def start(self) -> int:
        """Listen; returns the API's port. Raises `ResourceError` when an address is not to be had."""
        if self._keys:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._keys.reload)
        port, *_ = [await runner.start() for runner in self._runners]
        return port

    async def stop(self) -> None:
        """Stop listening, let answers end for a few seconds, then cut them. May be called twice."""
        if self._keys:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        await asyncio.gather(*(runner.stop() for runner in self._runners))


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
