"""The flags of `dynamictp bench`, and the job they make."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dynamictp.cli.numbers import FiniteRange
from dynamictp.errors import ConfigError

if TYPE_CHECKING:
    from dynamictp.bench.benchmark import Job

Command = Callable[..., None]


def _load_config(ctx: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    """Values of a YAML file become the flags' defaults; keys are the long flags with `_`."""
    if file is None:
        return
    try:
        values = msgspec.yaml.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}: {error}") from error
    names = {_key(option): option.name for option in ctx.command.params if isinstance(option, click.Option)}
    if unknown := set(values) - set(names):
        raise ConfigError(f"{file}: no flag is called {', '.join(sorted(unknown))}")
    ctx.default_map = {str(names[key]): value for key, value in values.items()}


def _key(option: click.Option) -> str:
    return option.opts[0].removeprefix("--").replace("-", "_")


DEFAULT_ARRIVALS = "poisson:1"
_POSITIVE = FiniteRange(0, min_open=True)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

JOB_OPTIONS = (
    click.option("--config", type=_FILE, is_eager=True, expose_value=False, callback=_load_config,
                 help="YAML file of these flags, keys with _ for -; flags given here go before it"),
    click.option("--mix", default="chat-rag", show_default=True,
                 help="a mix by name (see `bench workloads`), or CLASS=WEIGHT,…"),
    click.option("--rate", type=_POSITIVE, help="requests a second: short for --arrivals poisson:RATE"),
    click.option("--arrivals",
                 help="when requests are due, as KIND:VALUE,KEY=VALUE,… (see `bench workloads`) "
                      "[default: poisson:1]"),
    click.option("--duration", type=_POSITIVE, default=60.0, show_default=True, help="seconds of load"),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="of everything random"),
    click.option("--scale", type=_POSITIVE, default=1.0, show_default=True, help="factor on all lengths"),
    click.option("--tenant", "tenants", multiple=True, metavar="NAME:SHARE[:PRIORITY]",
                 help="who sends which share of the requests; may be repeated"),
    click.option("--prefixes", metavar="GROUPS:TOKENS[:SHARE]", help="shared system prompts"),
    click.option("--turns", default="1", show_default=True, metavar="MEAN[:THINK_S]",
                 help="conversations of several turns, and the pause before the next"),
    click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True),
    click.option("--longest", type=click.IntRange(0), default=0,
                 help="longest prompt + output in tokens [default: the model's context]"),
    click.option("--model", "model_name", help="model to ask for (default: the first the server lists)"),
    click.option("--tokenizer", type=_FILE, help="tokenizer.json, where the server has no /tokenize"),
    click.option("--ignore-eos/--no-ignore-eos", default=None,
                 help="ask for outputs of exactly the planned length [default: where known to work]"),
    click.option("--timeout", type=_POSITIVE, default=120.0, show_default=True,
                 help="seconds a request may take"),
    click.option("--drain", type=FiniteRange(0), default=30.0, show_default=True,
                 help="seconds after the load until running requests are cut"),
    click.option("--warmup", type=click.IntRange(0), default=4, show_default=True,
                 help="requests before the load, not counted"),
    click.option("--api-key-file", type=_FILE,
                 help="keys of the tenants, `key [tenant [priority]]` a line"),
    click.option("--api-key", help="key of the API; better in DYNAMICTP_API_KEY or OPENAI_API_KEY"),
    click.option("--admin-key", envvar="DYNAMICTP_ADMIN_KEY",
                 help="key of the admin interface; better in DYNAMICTP_ADMIN_KEY"),
    click.option("--admin-url", help="address of the admin interface and the metrics [default: URL]"),
    click.option("--slo-ttft-s", type=_POSITIVE, default=2.0, show_default=True, help="target of goodput"),
    click.option("--slo-tpot-ms", type=_POSITIVE, default=100.0, show_default=True, help="target of goodput"),
    click.option("--slo", "slo_overrides", multiple=True, metavar="NAME=TTFT_S:TPOT_MS",
                 help="other targets for a class or tenant; may be repeated"),
    click.option("--dry-run", is_flag=True, help="show what would be sent and exit"),
)  # fmt: skip

OUTPUT_OPTIONS = (
    click.option("--json", type=click.Path(dir_okay=False, path_type=Path), help="write everything here"),
    click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="write the report here"),
)


def job_options(command: Command) -> Command:
    """The flags that `make_job` reads."""
    for option in reversed(JOB_OPTIONS):
        command = option(command)
    return command


def output_options(command: Command) -> Command:
    """Where results go besides the terminal."""
    for option in reversed(OUTPUT_OPTIONS):
        command = option(command)
    return command


def make_job(given: Mapping[str, Any], changes: tuple[str, ...]) -> Job:
    """The job that flags describe. Raises ConfigError that names the flag's value at fault."""
    from dynamictp.bench.benchmark import Job  # noqa: PLC0415  (help and errors stay instant)
    from dynamictp.bench.record import Slo  # noqa: PLC0415
    from dynamictp.bench.session import Options  # noqa: PLC0415
    from dynamictp.bench.workload.classes import (  # noqa: PLC0415
        Prefixes,
        Tenant,
        Turns,
        Workload,
        parse_mix,
    )
    from dynamictp.bench.workload.spec import parse_arrivals  # noqa: PLC0415

    arrivals = _arrivals(given["arrivals"], given["rate"])
    parse_arrivals(arrivals, given["duration"])
    workload = Workload(
        classes=parse_mix(given["mix"]),
        arrivals=arrivals,
        duration_s=given["duration"],
        seed=given["seed"],
        scale=given["scale"],
        tenants=tuple(Tenant.parse(text) for text in given["tenants"]),
        prefixes=Prefixes.parse(given["prefixes"]) if given["prefixes"] else None,
        turns=Turns.parse(str(given["turns"])),
        endpoint=given["endpoint"],
        longest_tokens=given["longest"],
    )
    api_key, tenant_keys = read_keys(given["api_key_file"], given["api_key"])
    options = Options(
        model=given["model_name"],
        api_key=api_key,
        admin_url=given["admin_url"],
        admin_key=given["admin_key"],
        tenant_keys=tenant_keys,
        timeout_s=given["timeout"],
        drain_s=given["drain"],
        warmup=given["warmup"],
        ignore_eos=given["ignore_eos"],
        tokenizer=given["tokenizer"],
        changes=tuple(sorted(_parse_change(text) for text in changes)),
    )
    overrides = dict(_parse_slo(text) for text in given["slo_overrides"])
    return Job(workload, options, Slo(given["slo_ttft_s"], given["slo_tpot_ms"] / 1e3, overrides))


def _arrivals(form: str | None, rate_per_s: float | None) -> str:
    if rate_per_s is None:
        return form or DEFAULT_ARRIVALS
    if form is not None:
        raise ConfigError(
            f"--rate {rate_per_s:g} and --arrivals {form} both say when requests are due: give one"
        )
    return f"poisson:{rate_per_s:g}"


def read_keys(file: Path | None, key: str | None = None) -> tuple[str | None, dict[str, str]]:
    """The key for everyone (`key`, else from the environment), and those of tenants, from the server's form
    of key file.
    """
    if file is None:
        variables = (os.environ.get(name) for name in ("DYNAMICTP_API_KEY", "OPENAI_API_KEY"))
        return key or next(filter(None, variables), None), {}
    keys: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        words = line.partition("#")[0].split()
        if words:
            keys.setdefault(words[1] if len(words) > 1 else "", words[0])
    default = keys.pop("", None)
    return key or default or next(iter(keys.values()), None), keys


def _parse_change(text: str) -> tuple[float, str]:
    from dynamictp.errors import LayoutRefused  # noqa: PLC0415
    from dynamictp.layout import LayoutSpec  # noqa: PLC0415

    at_text, _, layout = text.partition("=")
    try:
        at_s = float(at_text)
        LayoutSpec.parse(layout)
    except (ValueError, LayoutRefused) as error:
        raise ConfigError(
            f"--set-layout '{text}': expected SECONDS=LAYOUT, as in 20=tp2 ({error})"
        ) from error
    return at_s, layout


def _parse_slo(text: str) -> tuple[str, tuple[float, float]]:
    name, _, targets = text.partition("=")
    ttft, _, tpot = targets.partition(":")
    try:
        pair = float(ttft), float(tpot) / 1e3
    except ValueError:
        pair = (math.nan, math.nan)
    if not name or not min(pair) > 0:
        raise ConfigError(f"--slo '{text}': expected NAME=TTFT_S:TPOT_MS, as in rag=5:100")
    return name, pair
