"""A plan for the terminal, at 100 columns."""

from __future__ import annotations

import math

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from dynamictp.advisor.drawing import draw_topology
from dynamictp.advisor.explain import explain, headline, seconds
from dynamictp.advisor.search import Candidate, Performance, Plan
from dynamictp.advisor.sharing import Division, Sharing
from dynamictp.advisor.side_by_side import ClassRow
from dynamictp.advisor.switches import switch_options
from dynamictp.cost.figures import Prediction
from dynamictp.cost.hardware import GIB
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.shares import residency

_GB = 1e9


def render_plan(plan: Plan, model: str, rows: int) -> RenderableType:
    """Facts, recommendation, reasons, placement, ranked table, switches, command, provenance."""
    question = plan.question
    parts: list[RenderableType] = [_facts(plan), *_residency(plan), Text("")]
    parts.append(Text(headline(plan), style="bold"))
    parts += _reasons(plan)
    best = plan.best
    if best is not None:
        parts += [
            Text(""),
            Text(f"Placement ({question.machine}, topology {question.machine.nodes.topology.source})"),
            Text(draw_topology(question.machine, best.placement)),
        ]
    if best is None:
        parts += [Text(note, style="dim") for note in _infeasible(plan)]
    else:
        parts += [Text(""), _candidates(plan, rows)]
        parts += [*_switches(plan), Text(""), *serve_command(plan, best, model)]
    parts += [Text(""), _provenance(plan)]
    return Group(*parts)


def describe_shape(shape: ModelShape) -> str:
    """One line of model facts."""
    total, active = shape.parts.total, shape.active_parameters
    moe = f" ({active / 1e9:.1f} B active a token)" if shape.experts is not None else ""
    heads = f"{shape.query_heads} query, {shape.kv_heads} KV heads"
    text = (
        f"{shape.name}: {total / 1e9:.2f} B parameters{moe}, {shape.weights.name} "
        f"{shape.weight_bytes / _GB:.1f} GB, {shape.attention} {heads}, {shape.layers} layers, "
        f"KV {shape.kv_bytes(1) / 1024:.0f} KiB a token"
    )
    return text + (f"; {shape.note}" if shape.note else "")


def _facts(plan: Plan) -> Text:
    question = plan.question
    workload, device = question.workload, question.machine.device
    note = f" ({device.note})" if device.note else ""
    return Text(
        f"{describe_shape(question.shape)}\n"
        f"{question.machine}{note}: {device.memory_bytes / GIB:.3g} GiB, "
        f"{device.bandwidth.value / _GB:,.0f} GB/s, "
        f"{device.flops(question.shape.weights.compute).value / 1e12:,.3g} TFLOP/s dense each\n"
        f"{workload.name}: {workload.mean_prompt:,.0f} tokens in and {workload.mean_output:,.0f} out on "
        f"average; targets P99 {seconds(question.targets.ttft_s)} to the first token, "
        f"{seconds(question.targets.tpot_s)} a token"
    )


def _table(*columns: tuple[str, JustifyMethod], title: str = "") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", title=title or None)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True, vertical="bottom")
    return table


def _residency(plan: Plan) -> list[RenderableType]:
    """What the resident degrees cost in memory (D1)."""
    question = plan.question
    if not question.resident or question.machine.device.shared_memory:
        return []
    held = residency(question.resident, question.machine.per_node)
    degrees = ", ".join(map(str, question.resident))
    cut = question.shape.weight_bytes / _GB
    return [
        Text(
            f"Resident for TP {degrees}: a device holds {held.mean:.0%} of the cut weights on average, "
            f"{held.largest:.0%} at most; {held.surplus * cut:.1f} GB ({held.surplus:.0%}) more than static "
            f"TP{max(question.resident)}"
        )
    ]


def _reasons(plan: Plan) -> list[RenderableType]:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for reason in explain(plan):
        mark = Text("✓", style="green") if reason.agrees else Text("≠", style="yellow")
        table.add_row(mark, Text.assemble((f"{reason.rule}: ", "bold"), reason.text))
    return [table] if table.row_count else []


def _candidates(plan: Plan, rows: int) -> RenderableType:
    table = _table(
        ("", "left"),
        ("dev", "right"),
        ("KV\ntokens", "right"),
        ("in SLO\nreq/s", "right"),
        ("carry\nreq/s", "right"),
        ("first token P99, s\nbound < est. (band)", "right"),
        ("mean token, ms\nbound < est. (band)", "right"),
        ("comm %\npre/dec", "right"),
        ("", "left"),
        title=f"Candidates, best first by {plan.question.objective}, at {plan.rate:.3g} req/s",
    )
    shown = [c for c in plan.candidates if c.runs][:rows]
    for candidate in shown:
        table.add_row(*_row(candidate))
    hidden = sum(c.runs for c in plan.candidates) - len(shown)
    notes = [
        "ok: inside the targets; misses: not; queues: for KV; over: more load than it carries; "
        "in SLO: what it carries inside the targets",
        *_infeasible(plan),
    ]
    if hidden:
        notes.insert(0, f"{hidden} more with --rows {len(shown) + hidden} or --json")
    return Group(table, *(Text(note, style="dim") for note in notes))


def _row(candidate: Candidate) -> list[RenderableType]:
    performance = candidate.performance
    assert performance is not None
    if candidate.meets_targets:
        mark = Text("ok", style="green")
    elif not candidate.stable:
        mark = Text("over", style="red")
    elif candidate.verdict == "fits with queueing":
        mark = Text("queues", style="yellow")
    else:
        mark = Text("misses", style="yellow")
    return [
        candidate.name,
        str(candidate.devices),
        _tokens(candidate.memory.kv_tokens * candidate.replicas),
        f"{performance.slo_capacity:.3g}",
        f"{performance.capacity.estimate:.3g}",
        _band(performance.ttft_p99, 1.0),
        _band(performance.tpot, 1e3),
        _shares(performance),
        mark,
    ]


def _band(prediction: Prediction, scale: float) -> str:
    bound, low, estimate, high = (
        _number(value * scale)
        for value in (prediction.bound, prediction.low, prediction.estimate, prediction.high)
    )
    return f"{bound} < {estimate} ({low}-{high})"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "∞"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def _tokens(count: int) -> str:
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.0f}k" if count >= 1e4 else str(count)


def _shares(performance: Performance) -> str:
    return f"{performance.prefill_communication * 100:.0f}/{performance.decode_communication * 100:.0f}"


def _infeasible(plan: Plan) -> list[str]:
    groups: dict[str, list[Candidate]] = {}
    for candidate in plan.candidates:
        if not candidate.runs:
            groups.setdefault(candidate.verdict, []).append(candidate)
    notes = []
    for verdict, members in groups.items():
        names = ", ".join(f"TP{c.tp}" + (f" PP{c.pp}" if c.pp > 1 else "") for c in members[:8])
        more = ", …" if len(members) > 8 else ""
        notes.append(f"{verdict}: {names}{more} ({members[0].reason})")
    return notes


def _switches(plan: Plan) -> list[RenderableType]:
    options = switch_options(plan)
    if not options:
        return []
    table = _table(
        ("to", "left"),
        ("prepare", "right"),
        ("drain", "right"),
        ("KV moved", "right"),
        ("weights held extra, or streamed", "right"),
        ("wins", "right"),
        ("breaks even after", "right"),
        title="Changing while it runs, and how long the change must last to pay",
    )
    for option in options:
        table.add_row(
            option.target,
            seconds(option.price.prepare_s),
            seconds(option.price.drain_s),
            f"{option.price.kv_bytes_moved / _GB:.1f} GB",
            f"{option.extra_weight_bytes / _GB:.1f} GB a device",
            f"{option.gain_devices:.1f} devices" if option.gain_devices > 0 else "nothing",
            seconds(option.break_even_s) if math.isfinite(option.break_even_s) else "never",
        )
    return [Text(""), table]


def serve_command(plan: Plan, best: Candidate, model: str) -> list[Text]:
    """The command that realises the choice, and what the server does not build yet."""
    layout = f"tp{best.tp}" + (f"pp{best.pp}" if best.pp > 1 else "")
    layout = f"{best.replicas}*{layout}" if best.replicas > 1 else layout
    question = plan.question
    context = min(question.shape.max_context, best.memory.kv_tokens)
    rows = best.performance.max_batch if best.performance is not None else 1
    # A KV reserve for changes of degree was held back only if they were asked for.
    mode = "dynamic" if question.limits.kv_cap < 1 else "static"
    lines = [
        Text(f"  dynamictp serve {model} --devices {best.devices} --layout '{layout}' \\", style="bold cyan"),
        Text(f"    --max-model-len {context} --max-num-seqs {rows} --mode {mode}", style="bold cyan"),
    ]
    notes = []
    if not question.machine.device.shared_memory:
        notes.append("this version of the server runs on CPU devices; the command is for when it has CUDA")
    if best.pp > 1:
        notes.append("pipeline stages are refused by name until they exist")
    if question.machine.nodes.nodes > 1:
        notes.append("one server per node")
    return lines + [Text(f"  {note}", style="dim") for note in notes]


def _provenance(plan: Plan) -> Text:
    from dynamictp.advisor.report import figures_json  # noqa: PLC0415  (one list of figures for both outputs)

    by_kind: dict[str, list[str]] = {}
    for name, figure in figures_json(plan).items():
        by_kind.setdefault(figure["provenance"], []).append(f"{name} {figure['value']:.3g}")
    text = "\n".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items())
    calibration = plan.question.calibration
    if calibration is not None:
        degrees = ", ".join(f"TP{degree}" for degree in calibration.degrees)
        pegged = (
            "; a ratio is beyond its limit, so the device is described wrongly" if calibration.pegged else ""
        )
        text = (
            f"measured: step times of {calibration.model} at {degrees} ({calibration.source}){pegged}\n{text}"
        )
    return Text(
        f"Where the figures come from (sources with --json; bound: ideal hardware; band: fast to slow "
        f"assumptions)\n{text}",
        style="dim",
    )


def render_side_by_side(rows: tuple[ClassRow, ...]) -> RenderableType:
    """The whole machine cut in different ways, for the four classes."""
    table = _table(
        ("class", "left"),
        ("req/s", "right"),
        ("", "left"),
        ("in SLO\nreq/s", "right"),
        ("first token P99, s\nbound < est. (band)", "right"),
        ("mean token, ms\nbound < est. (band)", "right"),
        ("all P99\ns", "right"),
        ("comm %\npre/dec", "right"),
        title="The whole machine cut in different ways, each class at half of the best capacity",
    )
    for row in rows:
        title = row.workload
        for candidate in row.candidates:
            performance = candidate.performance
            if performance is None:
                table.add_row(title, "", candidate.name, "", Text(candidate.verdict, style="dim"))
            else:
                table.add_row(
                    title,
                    f"{row.rate:.3g}" if title else "",
                    Text(candidate.name, style="green" if candidate is row.winner else ""),
                    f"{performance.slo_capacity:.3g}",
                    _band(performance.ttft_p99, 1.0),
                    _band(performance.tpot, 1e3),
                    _number(performance.e2e_p99.estimate),
                    _shares(performance),
                )
            title = ""
    meanings = "; ".join(f"{row.workload}: {row.meaning}" for row in rows)
    return Group(table, Text(meanings, style="dim"))


def render_sharing(sharing: Sharing) -> RenderableType:
    """Several models on the node."""
    if sharing.best is None:
        return Text("The models do not fit on the node together.", style="red")
    lines = [Text("Sharing the node", style="bold"), *_division(sharing.best)]
    even = sharing.powers_of_two
    if even is None:
        lines.append(Text("Degrees that are powers of two alone would not hold them.", style="yellow"))
    elif even.headroom < sharing.best.headroom - 1e-9:
        lines.append(
            Text(
                f"With powers of two alone: {even.layout}, {even.headroom:.0%} of the demand, "
                f"{even.idle} devices idle.",
                style="yellow",
            )
        )
    return Group(*lines)


def _division(division: Division) -> list[Text]:
    lines = [
        Text(
            f"  {division.layout}: every model carries at least {division.headroom:.0%} of its demand, "
            f"{division.idle} devices idle"
        )
    ]
    for part in division.parts:
        groups = " ".join("[" + ",".join(map(str, group)) + "]" for group in part.placement)
        lines.append(
            Text(
                f"    {part.model}: {part.candidate.name} on {groups}, {part.slo_capacity:.3g} of "
                f"{part.demand:.3g} req/s inside the targets"
            )
        )
    return lines


def print_to(console: Console, part: RenderableType) -> None:
    """Without highlighting: numbers are everywhere and would all be coloured."""
    console.print(part, highlight=False)
