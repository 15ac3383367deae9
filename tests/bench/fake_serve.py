"""A process that looks like `dynamictp serve` to the bench: three short tokens for every request.

Run as a script it prints the ready line, unless its first argument is `slow-start`.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tests.bench.scripted_server import Peer, scripted


class FakeServe:
    """Answers the routes the bench uses. Owns the layout it claims to have."""

    def __init__(self, token_gap_s: float = 0.001) -> None:
        self.layout = "tp1"
        self.layouts: list[str] = []
        self._token_gap_s = token_gap_s

    async def __call__(self, peer: Peer) -> None:
        match peer.method, peer.path:
            case "GET", "/v1/models":
                await peer.json({"data": [{"id": "demo"}]})
            case "POST", "/tokenize":
                await peer.json({"count": 2000, "tokens": list(range(2000))})
            case "POST", "/detokenize":
                await peer.json({"prompt": " ".join(map(str, peer.body["tokens"]))})  # type: ignore[call-overload]
            case "GET", "/admin/layout":
                await peer.json({"mode": "static", "pinned": False, "observed": self.layout})
            case "GET", path if path.startswith("/admin/switches/"):
                number = int(path.removeprefix("/admin/switches/s"))
                await peer.json({"switch": {"id": f"s{number}", "first_admitted_ms": 100.0 + number}})
            case "PUT", "/admin/layout":
                await peer.json({"switch": self._switch_to(str(peer.body["layout"]))})
            case "POST", "/v1/completions" | "/v1/chat/completions":
                await self._stream(peer)
            case _:
                await peer.json({"error": {"message": "no such route"}}, status=404)

    def _switch_to(self, layout: str) -> dict[str, object]:
        before, self.layout = self.layout, layout
        self.layouts.append(layout)
        outcome = "noop" if before == layout else "closed"
        ident = f"s{len(self.layouts)}"
        return {"id": ident, "from": before, "to": layout, "outcome": outcome, "phases_ms": {"commit": 0.5}}

    async def _stream(self, peer: Peer) -> None:
        await peer.head(x_dynamictp_tp="1")
        count = min(3, int(str(peer.body["max_tokens"])))
        for i in range(count):
            await peer.tokens(i, finish="length" if i == count - 1 else None)
            await asyncio.sleep(self._token_gap_s)
        await peer.usage(count)
        await peer.end()


async def main() -> None:
    print(f"pid {os.getpid()}", flush=True)
    if sys.argv[1:] == ["slow-start"]:
        await asyncio.Event().wait()
    async with scripted(FakeServe(token_gap_s=0.05)) as server:
        print(f"DynamicTP ready: {server.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
