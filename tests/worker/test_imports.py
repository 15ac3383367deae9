"""A worker has all its code before it serves: an import in a step stops a domain for milliseconds."""

from __future__ import annotations

import subprocess
import sys

_SAMPLE = """
import sys
import dynamictp.worker.process
import numpy as np
from dynamictp.messages import SamplingParams
from dynamictp.worker.sampler import choose, token_logprobs

before = set(sys.modules)
logits, tokens = np.linspace(-1, 1, 5000, dtype=np.float32), np.arange(9, dtype=np.int32)
rules = dict(top_p=0.5, top_k=7, min_p=0.1, presence_penalty=1, frequency_penalty=1, repetition_penalty=2)
for params in (
    SamplingParams(1, 9),
    SamplingParams(2, 9, temperature=0.0),
    SamplingParams(3, 9, top_p=0.9),
    SamplingParams(4, 9, min_tokens=20, stop_ids=(3,), logit_bias=((5, 1.0),), **rules),
):
    choose(logits, tokens, 4, params)
token_logprobs(logits, 3, 20)
print(sorted(set(sys.modules) - before))
"""


def test_sampling_imports_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", _SAMPLE], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
