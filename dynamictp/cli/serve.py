"""`dynamictp serve`: flags are the configuration's fields."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
import msgspec

from dynamictp.cli.control_options import control_flags, control_options
from dynamictp.config import ServeConfig, build_config, to_yaml
from dynamictp.errors import INTERRUPTED

HELP = {
    "devices": "devices of the pool (default: usable cores / cores per device)",
    "cores_per_device": "cores of one device",
    "layout": "first layout, such as tp2 or tp1+tp1",
    "mode": "who changes the layout: nobody but you (static), the planner, or a planner that only talks",
    "dtype": "element type of weights, activations and KV pages",
    "weights": "weight quantisation",
    "kernels": "kernel path",
    "numerics": "exact: the same bits at every degree; fast is not built yet and refused",
    "kv_memory": (
        "memory for KV pages, such as 2GiB (default: 25 % of available memory, at most 8 GiB); in dynamic "
        "mode with two or more devices a domain fills at most 70 % of its part, so that a switch has room"
    ),
    "page_tokens": "tokens of one KV page",
    "max_model_len": "longest prompt + output in tokens (default: the model's context)",
    "max_num_seqs": "most requests running at once in a domain",
    "max_batched_tokens": "most tokens in one step",
    "max_step_ms": "longest step beside running streams, in predicted ms",
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "insecure": "allow an address that others can reach, without keys",
    "admin_host": "address for /admin, /metrics and /dashboard (default: 127.0.0.1), with --admin-port",
    "admin_port": "port of their own for /admin, /metrics and /dashboard",
    "api_key_file": "file of API keys, `key [tenant [priority]]` a line; read again on SIGHUP",
    "admin_key_file": "file of admin keys, one a line; read again on SIGHUP",
    "public_metrics": "show /metrics on the main port, without a key",
    "allowed_hosts": "names besides addresses and localhost for a port without keys, as a,b or *",
    "max_waiting": "most requests that wait for their first token",
    "max_waiting_tokens": "most prompt tokens that wait",
    "max_wait_s": "longest predicted wait before a prompt begins, beyond which it is refused; 0: no limit",
    "request_timeout_s": "seconds after which a request is given up; it may ask for less (default: never)",
    "metrics_alias": "show metrics a second time under the names of another server, for its dashboards",
    "otlp_traces_endpoint": "URL that traces go to, such as http://127.0.0.1:4318/v1/traces (default: none)",
    "served_model_name": "name of the model in the API",
    "chat_template": "file with a Jinja chat template that replaces the model's",
    "generation_config": "auto: take sampling defaults from the model",
    "collective_deadline_s": "longest wait for a peer inside a step, in seconds",
    "hang_s": "seconds without progress after which a worker counts as hanging, unless its step is long",
    "crash_budget": "crashes of one process in ten minutes beyond which the server gives up",
    "trust_remote_code": "refused: no code that comes with a model is ever run",
    "drain_s": "seconds that running requests may take after SIGTERM",
    "journal": "file that the planner's snapshots and decisions are added to, as JSON lines",
    "calibration": "file of `dynamictp calibrate`, from which the planner takes its first capacities",
}

CONFIG_HELP = (
    "YAML file of these flags, keys with _ for -, the --slo ones in a mapping slo; also slo's classes and "
    "tenants, models and ramp_steps, which have no flag; flags given here go before it"
)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """One option per field of the configuration; an option that is not given leaves the field alone."""
    hints = get_type_hints(ServeConfig)
    for field in reversed(msgspec.structs.fields(ServeConfig)):
        if field.name in {"model", "models", "control"}:
            continue
        hint: Any = hints[field.name]
        flag = f"--{field.name.replace('_', '-')}"
        arguments: dict[str, Any] = {"default": None, "help": HELP[field.name]}
        if hint is bool:
            arguments |= {"is_flag": True}
        elif get_origin(hint) is Literal:
            arguments |= {"type": click.Choice([value for value in get_args(hint) if value])}
        else:
            arguments |= {"type": hint}
        if field.default not in ("", 0, False):
            arguments["help"] += f" [default: {field.default}]"
        command = click.option(flag, field.name, **arguments)(command)
    return command


@click.command()
@click.argument("model", required=False)
@_options
@control_options
@click.option("--config", "file", type=click.Path(dir_okay=False), help=CONFIG_HELP)
@click.option("--print-config", is_flag=True, help="print the configuration in force and exit")
def serve(model: str | None, file: str | None, print_config: bool, **flags: Any) -> None:
    """Serve MODEL: a folder (config.json, safetensors, tokenizer), a .gguf file, or `demo` (the default)."""
    given = control_flags({key: value for key, value in flags.items() if value is not None})
    if model is not None:
        given["model"] = model
    config = build_config(given, file)
    if print_config:
        click.echo(to_yaml(config), nl=False)
        return
    # From here to the event loop's own handlers: the import takes a second. SIGINT is no KeyboardInterrupt
    # here: after one that left an `exec`, which imports are full of, `python -m` ends by the signal though
    # it was caught.
    for number, code in ((signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 0)):
        signal.signal(number, partial(_leave, code))
    from dynamictp.server.launch import serve_forever  # noqa: PLC0415  (help and errors stay instant)

    serve_forever(config)


def _leave(code: int, _number: int, _frame: object) -> None:
    sys.exit(code)
