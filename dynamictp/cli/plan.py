"""`dynamictp plan`: which TP, PP and replicas for a model on a machine under a load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.text import Text

from dynamictp.errors import ConfigError

WIDTH = 100


@click.command()
@click.argument("model")
@click.option("--device", help="device by name, `local` for this computer, or a YAML file that describes one")
@click.option(
    "--devices", type=click.IntRange(1, 64), help="devices of a node [default: 8, or the topology's]"
)
@click.option("--nodes", type=click.IntRange(1, 1024), help="nodes of that kind [default: 1]")
@click.option("--topology", type=click.Path(dir_okay=False), help="output of `nvidia-smi topo -m`, or YAML")
@click.option("--workload", default="chat-rag", show_default=True, help="class, mix, or CLASS=WEIGHT,…")
@click.option("--scale", type=float, default=1.0, show_default=True, help="multiplies all lengths")
@click.option("--rate", type=float, help="requests per second [default: half of what the machine carries]")
@click.option("--context", type=int, default=0, help="longest prompt + output to hold, in tokens")
@click.option("--ttft-s", type=float, default=2.0, show_default=True, help="target, P99 to the first token")
@click.option("--tpot-ms", type=float, default=100.0, show_default=True, help="target, P99 of a token")
@click.option(
    "--objective",
    type=click.Choice(["efficiency", "latency", "throughput", "goodput"]),
    default="efficiency",
    show_default=True,
    help="fewest devices inside the targets, lowest time per token, most carried, most inside per device",
)
@click.option("--mode", type=click.Choice(["static", "dynamic"]), default="static", show_default=True,
              help="dynamic holds communicators and a KV reserve for changes of degree")  # fmt: skip
@click.option("--resident", help="degrees a node may change between, as 4,6,8: their weights stay resident")
@click.option("--max-stages", type=int, default=16, show_default=True, help="most pipeline stages")
@click.option("--max-num-seqs", type=int, help="most running requests of a replica [default: 256, CPU 64]")
@click.option("--max-batched-tokens", type=int, help="most tokens of a step [default: 2048, CPU 512]")
@click.option("--weight-bits", type=float, help="bits a stored weight takes, instead of the model's")
@click.option("--kv-bits", type=click.Choice(["8", "16"]), help="bits of a cached element")
@click.option("--calibration", type=click.Path(dir_okay=False), help="file of `dynamictp calibrate`")
@click.option(
    "--beside", multiple=True, metavar="MODEL[:RATE]", help="another model on the same node (again)"
)
@click.option("--rows", type=click.IntRange(1), default=12, show_default=True, help="candidates to show")
@click.option("--classes/--no-classes", default=True, show_default=True, help="compare the four classes too")
@click.option("--picture", type=click.Path(dir_okay=False), help="draw the placement into this .png or .svg")
@click.option("--json", "as_json", is_flag=True, help="everything as JSON")
def plan(model: str, **flags: Any) -> None:
    """Say which TP, PP and replicas suit MODEL on a machine, and why.

    MODEL: a known name (try a wrong one for the list), `demo`, a folder, a config.json or a .gguf file.
    Nothing is downloaded or started.
    """
    # The advisor's imports take half a second; help and errors of other commands do not wait for them.
    from dynamictp.advisor.search import make_plan  # noqa: PLC0415
    from dynamictp.advisor.sharing import share_node  # noqa: PLC0415
    from dynamictp.advisor.side_by_side import side_by_side  # noqa: PLC0415

    question = _question(model, flags)
    found = make_plan(question)
    rows = side_by_side(question, flags["scale"]) if flags["classes"] else ()
    sharing = share_node([question, *_others(question, flags["beside"])]) if flags["beside"] else None
    if flags["picture"]:
        from dynamictp.advisor.picture import draw_picture  # noqa: PLC0415

        draw_picture(question.machine, found.best, Path(flags["picture"]))
    if flags["as_json"]:
        from dynamictp.advisor import report  # noqa: PLC0415

        data = report.plan_json(found)
        data["side_by_side"] = report.side_by_side_json(rows)
        data["sharing"] = None if sharing is None else report.sharing_json(sharing)
        click.echo(msgspec.json.format(msgspec.json.encode(data)).decode())
        return
    from dynamictp.advisor import render  # noqa: PLC0415

    console = Console()
    console = Console(width=max(console.width, WIDTH))
    render.print_to(console, render.render_plan(found, model, flags["rows"]))
    if rows:
        render.print_to(console, Text(""))
        render.print_to(console, render.render_side_by_side(rows))
    if sharing is not None:
        render.print_to(console, Text(""))
        render.print_to(console, render.render_sharing(sharing))


def _question(model: str, flags: dict[str, Any]) -> Any:
    from dynamictp.advisor.catalogue import open_shape  # noqa: PLC0415
    from dynamictp.advisor.search import Question  # noqa: PLC0415
    from dynamictp.advisor.workloads import find_workload  # noqa: PLC0415
    from dynamictp.cost.batching import Targets  # noqa: PLC0415
    from dynamictp.cost.calibration import Calibration  # noqa: PLC0415

    for name in ("scale", "rate", "ttft_s", "tpot_ms"):
        if flags[name] is not None and not 0 < flags[name] < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {flags[name]:g}; expected a finite number above 0"
            )
    shape = _stored(open_shape(model), flags)
    if not 0 <= flags["context"] <= shape.max_context:
        raise ConfigError(f"--context is {flags['context']}; {shape.name} holds up to {shape.max_context}")
    calibration = Calibration.load(Path(flags["calibration"])) if flags["calibration"] else None
    machine, limits, assumptions = _machine(flags, calibration)
    if flags["mode"] == "dynamic":
        limits = limits.for_switching()
    changes: dict[str, Any] = {}
    for name in ("max_num_seqs", "max_batched_tokens"):
        if flags[name] is not None:
            if flags[name] < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {flags[name]}; expected at least 1")
            changes[name] = flags[name]
    return Question(
        shape=shape,
        machine=machine,
        workload=find_workload(flags["workload"], flags["scale"]),
        rate=flags["rate"],
        context=flags["context"],
        targets=Targets(flags["ttft_s"], flags["tpot_ms"] / 1e3),
        limits=msgspec.structs.replace(limits, **changes),
        assumptions=assumptions,
        calibration=calibration,
        objective=flags["objective"],
        max_stages=flags["max_stages"],
        resident=_resident(flags["resident"], machine.per_node),
    )


def _resident(text: str | None, devices: int) -> tuple[int, ...]:
    """The degrees of --resident. Raises `ConfigError`."""
    if text is None:
        return ()
    try:
        degrees = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError(f"--resident {text}: expected degrees such as 4,6,8") from error
    if not all(1 <= degree <= devices for degree in degrees):
        raise ConfigError(f"--resident {text}: degrees go from 1 to the node's {devices} devices")
    return degrees


def _stored(shape: Any, flags: dict[str, Any]) -> Any:
    """The shape with weights and cache stored as asked."""
    from dynamictp.cost.shape import WeightFormat  # noqa: PLC0415

    bits = flags["weight_bits"]
    if bits is not None:
        if not 1 <= bits <= 32:
            raise ConfigError(f"--weight-bits is {bits:g}; expected 1 to 32")
        shape = msgspec.structs.replace(shape, weights=WeightFormat(f"{bits:g}-bit", bits))
    if flags["kv_bits"] is not None:
        shape = msgspec.structs.replace(shape, kv_bytes_per_element=int(flags["kv_bits"]) // 8)
    return shape


def _machine(flags: dict[str, Any], calibration: Any) -> tuple[Any, Any, Any]:
    """(machine, engine limits, assumptions) of --device, --devices, --nodes and --topology."""
    from dynamictp.advisor.devices import find_device  # noqa: PLC0415
    from dynamictp.advisor.machine import build_machine, default_nodes, device_from_products  # noqa: PLC0415
    from dynamictp.advisor.topology_file import read_topology  # noqa: PLC0415
    from dynamictp.cost.hardware import Assumptions, EngineLimits  # noqa: PLC0415

    name, file = flags["device"], flags["topology"]
    if name == "local":
        from dynamictp.advisor import local  # noqa: PLC0415

        if file or flags["nodes"]:
            raise ConfigError("--device local is this computer alone: no --topology and no --nodes")
        measured = None if calibration is None else local.measured_by(calibration)
        machine, limits = local.local_machine(flags["devices"] or 0, measured)
        return machine, limits, local.ASSUMPTIONS
    nodes = read_topology(Path(file)) if file else None
    device = find_device(name) if name else device_from_products(nodes) if nodes else None
    if device is None:
        raise ConfigError(
            "--device is missing: a name (try a wrong one for the list), `local`, or a YAML file"
        )
    if nodes is None:
        nodes = default_nodes(device, flags["devices"] or 8, flags["nodes"] or 1)
    elif flags["devices"]:
        raise ConfigError("--devices and --topology both say how many devices there are; give one of them")
    elif flags["nodes"]:
        nodes = msgspec.structs.replace(nodes, nodes=flags["nodes"])
    return build_machine(device, nodes), EngineLimits(), Assumptions()


def _others(question: Any, beside: tuple[str, ...]) -> list[Any]:
    """Questions of the further models: same machine, workload and targets."""
    from dynamictp.advisor.catalogue import open_shape  # noqa: PLC0415

    others = []
    for text in beside:
        model, colon, rate = text.rpartition(":")
        if not colon:
            model, rate = text, ""
        try:
            asked = float(rate) if rate else None
        except ValueError as error:
            raise ConfigError(
                f"--beside {text}: expected MODEL or MODEL:RATE in requests per second"
            ) from error
        others.append(msgspec.structs.replace(question, shape=open_shape(model), rate=asked))
    return others
