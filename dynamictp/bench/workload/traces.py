"""Recorded traffic: samples that come with the package, and loaders of the public formats.

Requests: the Azure LLM inference traces (`TIMESTAMP,ContextTokens,GeneratedTokens`), this package's own
form of them (`t_s,input_tokens,output_tokens`), and Mooncake's JSONL (`timestamp` in ms, `input_length`,
`output_length`, `hash_ids` of 512-token blocks). Rates: `t_s,rate_rps`, with a `pool` column or without.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from dynamictp.bench.workload.arrivals import RateCurve
from dynamictp.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"
REQUEST_TRACES = {"azure-conv": "azure_2023_conv_10min.csv", "azure-code": "azure_2023_code_20min.csv"}
RATE_TRACES = {"servegen-day": "servegen_m_small_72h.csv", "servegen-bursts": "servegen_m_large_72h.csv"}

HASH_BLOCK_TOKENS = 512
"""Tokens of one Mooncake hash block."""
# A stamp's fraction of a second has seven digits, one more than datetime reads.
_STAMP_CHARS = 26


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request, `t_s` after the trace's start. Equal leading `hash_ids` mean equal text."""

    t_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def load_trace(name: str) -> tuple[TraceRow, ...]:
    """Rows in order of time, the first at 0. Raises ConfigError for what isn't a trace of requests."""
    path = _find(name, REQUEST_TRACES)
    try:
        rows = _mooncake(path) if path.suffix == ".jsonl" else _csv_rows(path)
    except (ValueError, KeyError, UnicodeDecodeError, csv.Error, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no trace of requests this program reads: {error}") from error
    if not rows:
        raise ConfigError(f"{path} holds no request")
    rows.sort(key=lambda row: row.t_s)
    origin_s = rows[0].t_s
    return tuple(TraceRow(r.t_s - origin_s, r.input_tokens, r.output_tokens, r.hash_ids) for r in rows)


def load_rates(name: str, pool: str = "", start_s: float = 0.0) -> RateCurve:
    """Requests per second from `start_s` of the recording on, linear between its points.

    `pool` chooses among several of one file. Raises ConfigError.
    """
    path = _find(name, RATE_TRACES)
    try:
        with path.open(newline="") as file:
            points = _rate_points(csv.DictReader(file), pool)
    except (ValueError, KeyError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{path} is no file of rates: {error}; expected columns t_s and rate_rps"
        ) from error
    kept = [(t - start_s, rate) for t, rate in sorted(points) if t >= start_s]
    if len(kept) < 2:
        raise ConfigError(f"{path} has fewer than two rates of pool '{pool}' from {start_s:g} s on")
    first_s = kept[0][0]
    return RateCurve(tuple(t - first_s for t, _ in kept), tuple(rate for _, rate in kept))


def _find(name: str, built_in: Mapping[str, str]) -> Path:
    path = DATA / built_in[name] if name in built_in else Path(name)
    if not path.is_file():
        raise ConfigError(f"no trace '{name}': expected a file, or one of {', '.join(built_in)}")
    return path


def _rate_points(rows: Iterable[Mapping[str, str]], pool: str) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    pools: set[str] = set()
    for row in rows:
        name = row.get("pool", "")
        pools.add(name)
        if not pool or name == pool:
            points.append((float(row["t_s"]), float(row["rate_rps"])))
    if not pool and len(pools) > 1:
        raise ValueError(f"it holds several pools, choose one with pool=: {', '.join(sorted(pools))}")
    return points


def _csv_rows(path: Path) -> list[TraceRow]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        names = tuple(reader.fieldnames or ())
        formats: dict[tuple[str, ...], Callable[[str], float]] = {
            ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _stamp_s,
            ("t_s", "input_tokens", "output_tokens"): float,
        }
        if names not in formats:
            raise ValueError(f"columns {', '.join(names)}")
        time, taken, given = names
        seconds = formats[names]
        return [TraceRow(seconds(row[time]), int(row[taken]), int(row[given])) for row in reader]


def _stamp_s(text: str) -> float:
    return datetime.fromisoformat(text[:_STAMP_CHARS]).timestamp()


def _mooncake(path: Path) -> list[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    rows = decoder.decode_lines(path.read_bytes())
    return [TraceRow(r.timestamp / 1e3, r.input_length, r.output_length, r.hash_ids) for r in rows]
