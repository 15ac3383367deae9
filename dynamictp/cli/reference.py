"""Reference pages made from the code: commands with their flags, metrics, the deployment matrix.

`python -m dynamictp.cli.reference [--check]` writes (or compares) the pages of `docs/`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dynamictp.advisor.matrix import matrix_page
from dynamictp.cli import cli
from dynamictp.control.config import ControlConfig, Slo, parameters
from dynamictp.server.field_table import api_fields_page
from dynamictp.server.metrics import Metrics

NOTE = "<!-- Made by scripts/gen-docs from the code; edits here are lost. -->\n\n"
WIDTH = 100


def command_page() -> str:
    """Help of every command, as the terminal shows it."""
    parts = [f"{NOTE}# Commands\n"]
    for name, command in _commands(cli, "dynamictp"):
        context = click.Context(command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH)
        parts.append(f"## `{name}`\n\n```\n{command.get_help(context).rstrip()}\n```\n")
    parts.append(
        "Exit codes: 0 done, 1 failure, 2 usage or configuration, 3 model refused or corrupt, "
        "4 resource (port, memory, devices), 130 interrupted.\n"
    )
    return "\n".join(parts)


def metric_page() -> str:
    """Name, kind, labels and meaning of every metric of `/metrics`."""
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in Metrics().collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(getattr(metric, "_labelnames", ()))
        rows.append(f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |")
    intro = (
        "Served at `/metrics` in the Prometheus text format, on the admin port if there is one "
        "([access.md](access.md)). With several models each model's series carry `model_name`. "
        "`--metrics-alias vllm` adds the `vllm:` names ([observability.md](observability.md))."
    )
    return f"{NOTE}# Metrics\n\n{intro}\n\n" + "\n".join(rows) + "\n"


def deployment_page() -> str:
    """What the advisor recommends for usual models, machines and loads."""
    return matrix_page(NOTE)


def control_page() -> str:
    """Every parameter of the control plane."""
    rows = ["| parameter | default | range | reload | effect |", "|---|---|---|---|---|"]
    for prefix, kind in (("slo.", Slo), ("", ControlConfig)):
        rows += [
            f"| `{prefix}{p.name}` | {p.default} | {p.range} | {'yes' if p.reload else 'no'} | {p.effect} |"
            for p in parameters(kind)
        ]
    intro = (
        "Keys of the configuration file; [control.md](control.md) says how they work together. Targets can "
        "differ by class and tenant: `slo.classes.NAME` and `slo.tenants.NAME` take the same three keys, a "
        "tenant's go over a class's. Those marked *reload* can be changed while the server runs."
    )
    return f"{NOTE}# Parameters of the control plane\n\n{intro}\n\n" + "\n".join(rows) + "\n"


PAGES = {
    "api-fields.md": lambda: api_fields_page(NOTE),
    "commands.md": command_page,
    "metrics.md": metric_page,
    "deployment-matrix.md": deployment_page,
    "control-parameters.md": control_page,
}


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for child in sorted(command.commands):
            yield from _commands(command.commands[child], f"{name} {child}")


@click.command()
@click.option("--check", is_flag=True, help="only say which pages differ from the code; exit 1 if any")
def main(check: bool) -> None:
    """Write the generated pages of docs/."""
    folder = Path(__file__).parents[2] / "docs"
    stale = [name for name, page in PAGES.items() if not _same(folder / name, page())]
    if check:
        for name in stale:
            click.echo(f"docs/{name} differs from the code: run scripts/gen-docs", err=True)
        sys.exit(bool(stale))
    for name in stale:
        (folder / name).write_text(PAGES[name](), encoding="utf-8")
        click.echo(f"wrote docs/{name}")


def _same(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
