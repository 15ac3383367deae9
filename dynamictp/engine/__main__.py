"""`python -m dynamictp.engine --start FILE --sockets DIR --control-fd N`: spawned by the supervisor."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import msgspec

from dynamictp.engine.process import become_engine_process, map_control, run_engine
from dynamictp.errors import FatalError
from dynamictp.messages import EngineStart
from dynamictp.process import settle_heap

log = logging.getLogger("dynamictp.engine")


def main() -> int:
    parser = argparse.ArgumentParser(prog="dynamictp.engine", description=__doc__)
    parser.add_argument("--start", required=True, help="JSON of EngineStart, or a file that holds it")
    parser.add_argument("--sockets", type=Path, required=True, help="owner-only directory of the sockets")
    parser.add_argument("--control-fd", type=int, required=True, help="shared memory of the control words")
    arguments = parser.parse_args()
    become_engine_process()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    text = arguments.start
    data = text.encode() if text.lstrip().startswith("{") else Path(text).read_bytes()
    start = msgspec.json.decode(data, type=EngineStart)
    try:
        control = map_control(arguments.control_fd, start.comm_slots, start.devices)
        settle_heap()
        run_engine(start, arguments.sockets, control)
    except FatalError as error:
        log.critical("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
