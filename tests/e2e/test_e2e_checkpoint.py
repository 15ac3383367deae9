"""A Hugging Face folder served over HTTP gives the log-probabilities of its reference implementation."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.conftest import complaints
from tests.e2e.live import Api
from tests.model.checkpoints import make_checkpoint

pytestmark = pytest.mark.e2e

PROMPT = list(range(10, 90))
MAX_DIFFERENCE = {"fp32": 2e-3, "bf16": 0.6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("checkpoint") / "small", tied=False, sharded=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[float]:
    """Log-probability of each prompt token after the first."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    values: list[float] = logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    return values


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_folder_is_served(folder: Path, reference: list[float], dtype: str) -> None:
    arguments = ("--dtype", dtype, "--devices", "2", "--layout", "tp2", "--kv-memory", "64MiB")
    with (
        ServerProcess("serve", str(folder), "--served-model-name", "random", *arguments) as server,
        Api(server.url) as api,
    ):
        assert [model["id"] for model in api.http.get("/v1/models").json()["data"]] == ["random"]
        scored = api.complete(PROMPT, 0, model="random", echo=True, logprobs=0)
        found = scored["choices"][0]["logprobs"]["token_logprobs"]
        assert found[0] is None
        worst = max(abs(a - b) for a, b in zip(found[1:], reference, strict=True))
        assert worst <= MAX_DIFFERENCE[dtype]
        messages = [{"role": "user", "content": "12 + 3"}]
        chat = {
            "model": "random",
            "messages": messages,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        first = api.http.post("/v1/chat/completions", json=chat).json()
        assert first["usage"]["completion_tokens"] == 8
        assert first["dynamictp"]["choices"][0]["tp"] == 2
        api.set_layout("tp1")
        second = api.http.post("/v1/chat/completions", json=chat).json()
        assert second["choices"] == first["choices"]
        assert not complaints("\n".join(server.lines))
