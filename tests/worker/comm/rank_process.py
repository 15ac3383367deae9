"""One rank in its own process, for test_shm_processes.py: argv is a JSON description, stdout its result."""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np

from dynamictp.errors import CommunicatorBroken
from dynamictp.worker.comm.control import open_control
from dynamictp.worker.comm.shm import ShmCommunicator, map_shared


def main() -> None:
    plan = json.loads(sys.argv[1])
    memory = map_shared(plan["fd"])
    control = open_control(memory, 1, plan["world"])
    end = ShmCommunicator(
        memory,
        plan["offset"],
        plan["size"],
        plan["rank"],
        plan["world"],
        control=control,
        slot=0,
        epoch=plan["epoch"],
        progress_worker=plan["rank"],
        deadline_s=plan["deadline_s"],
        spin=plan["spin"],
    )
    written = np.frombuffer(memory, np.int64, plan["world"], plan["written_at"])
    rng = random.Random(plan["rank"])
    try:
        for step in range(1, plan["rounds"] + 1):
            if rng.random() < 0.005:
                time.sleep(rng.random() * 2e-3)
            written[plan["rank"]] = step
            end.barrier()
            seen = written.copy()
            if np.any(seen < step) or np.any(seen > step + 1):
                raise SystemExit(f"step {step} saw {seen}")
            if step % 50 == 0:
                total = np.full(100, end.rank + 1, np.float32)
                end.all_reduce(total)
                if np.any(total != sum(range(1, end.world + 1))):
                    raise SystemExit(f"step {step} summed to {total}")
    except CommunicatorBroken as error:
        sys.stdout.write(json.dumps({"broken": str(error), "state": end.state, "at": time.monotonic()}))
        return
    sys.stdout.write(json.dumps({"rounds": plan["rounds"], "state": end.state}))


if __name__ == "__main__":
    main()
