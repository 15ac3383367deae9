"""The package's samples, and the public formats as their owners publish them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dynamictp.bench.workload.traces import DATA, RATE_TRACES, REQUEST_TRACES, load_rates, load_trace
from dynamictp.errors import ConfigError


def test_the_samples_have_the_character_of_what_they_were_cut_from() -> None:
    conversation, code = load_trace("azure-conv"), load_trace("azure-code")
    assert conversation[0].t_s == code[0].t_s == 0.0
    assert 550 < conversation[-1].t_s < 600
    assert 900 < np.mean([row.input_tokens for row in conversation]) < 1500
    assert 100 < np.mean([row.output_tokens for row in conversation]) < 300
    assert 1500 < np.mean([row.input_tokens for row in code]) < 2600
    assert np.mean([row.output_tokens for row in code]) < 50


def test_every_file_of_the_package_is_small_and_attributed() -> None:
    notes = (DATA / "README.md").read_text()
    for name in (*REQUEST_TRACES.values(), *RATE_TRACES.values()):
        assert (DATA / name).stat().st_size <= 60_000
        assert name in notes
    assert "CC-BY" in notes
    assert "Apache-2.0" in notes


def test_azure_traces_are_read_as_published(tmp_path: Path) -> None:
    file = tmp_path / "conv.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = load_trace(str(file))
    assert (first.t_s, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.t_s == pytest.approx(4.314579, abs=1e-6)


def test_mooncake_traces_carry_their_hash_blocks(tmp_path: Path) -> None:
    file = tmp_path / "conversation.jsonl"
    file.write_text(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 59]}\n'
    )
    first, second = load_trace(str(file))
    assert (first.t_s, second.t_s) == (0.0, pytest.approx(3.053))
    assert (first.hash_ids, second.hash_ids) == ((46, 47), (46, 59))


def test_rates_of_one_pool_from_a_time_on(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text("pool,t_s,rate_rps,more\na,0,1,x\na,600,3,x\na,1200,5,x\nb,0,7,x\nb,600,7,x\n")
    assert load_rates(str(file), "b").peak_per_s == 7.0
    assert load_rates(str(file), "a", 600.0).rates_per_s == (3.0, 5.0)
    with pytest.raises(ConfigError, match="several pools"):
        load_rates(str(file))
    with pytest.raises(ConfigError, match="fewer than two"):
        load_rates(str(file), "c")
    assert load_rates("servegen-day").duration_s == pytest.approx(72 * 3600 - 600)


@pytest.mark.parametrize(
    "content", ["a,b\n1,2\n", "t_s,input_tokens,output_tokens\n", "t_s,input_tokens,output_tokens\n1,x,2\n"]
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "x.csv"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.csv"):
        load_trace(str(file))
    with pytest.raises(ConfigError, match="azure-conv"):
        load_trace("no-such")
