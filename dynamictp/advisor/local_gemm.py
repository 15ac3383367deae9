"""One process that measures matrix products on one core: writes FLOP/s of float32 products for a while."""

from __future__ import annotations

import sys
import time

import numpy as np

_SIZE = 1024
_LEAST_RUNS = 4


def gemm_flops(seconds: float) -> float:
    """FLOP/s of 1,024³ products of float32 in numpy's library, best of the runs that fit into `seconds`.

    At least four count, after one that does not: the library's first product sets up its memory, and a run
    that fitted no second one found a twentieth of the usual speed.
    """
    left = np.ones((_SIZE, _SIZE), dtype=np.float32)
    right, out = left.copy(), left.copy()
    np.matmul(left, right, out=out)
    runs: list[float] = []
    start = time.perf_counter()
    while (begin := time.perf_counter()) - start < seconds or len(runs) < _LEAST_RUNS:
        np.matmul(left, right, out=out)
        runs.append(time.perf_counter() - begin)
    return 2 * _SIZE**3 / min(runs)


if __name__ == "__main__":
    sys.stdout.write(f"{gemm_flops(float(sys.argv[1]))}\n")
