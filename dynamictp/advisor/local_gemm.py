"""One process that measures matrix products on one core: writes FLOP/s of float32 products for a while."""

from __future__ import annotations

import sys
import time

import numpy as np

_SIZE = 1024


def gemm_flops(seconds: float) -> float:
    """FLOP/s of 1,024³ products of float32 in numpy's library, best of the runs that fit into `seconds`."""
    left = np.ones((_SIZE, _SIZE), dtype=np.float32)
    right, out = left.copy(), left.copy()
    best = 0.0
    start = time.perf_counter()
    while (begin := time.perf_counter()) - start < seconds:
        np.matmul(left, right, out=out)
        best = max(best, 2 * _SIZE**3 / (time.perf_counter() - begin))
    return best


if __name__ == "__main__":
    sys.stdout.write(f"{gemm_flops(float(sys.argv[1]))}\n")
