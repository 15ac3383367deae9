"""The `dynamictp` command: one module per group of subcommands, exit codes in one place."""

from __future__ import annotations

import sys

import click

from dynamictp import __version__
from dynamictp.cli.bench import bench
from dynamictp.cli.calibrate import calibrate
from dynamictp.cli.diagnose import diagnose_command
from dynamictp.cli.export import export
from dynamictp.cli.layout import layout
from dynamictp.cli.lease import lease
from dynamictp.cli.plan import plan
from dynamictp.cli.serve import serve
from dynamictp.cli.simulate import simulate
from dynamictp.cli.top import top
from dynamictp.errors import INTERRUPTED, DynamicTPError, FatalError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dynamictp")
def cli() -> None:
    """Serve large language models with a tensor-parallel degree that changes while they run."""


cli.add_command(serve)
cli.add_command(layout)
cli.add_command(lease)
cli.add_command(plan)
cli.add_command(simulate)
cli.add_command(calibrate)
cli.add_command(bench)
cli.add_command(diagnose_command)
cli.add_command(export)
cli.add_command(top)


def main() -> None:
    """Run the command and exit.

    0, 1 failure, 2 usage or configuration, 3 model, 4 resource, 130 interrupted.
    """
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = INTERRUPTED
    except FatalError as error:
        click.echo(f"dynamictp: {error}", err=True)
        code = error.exit_code
    except DynamicTPError as error:
        click.echo(f"dynamictp: {error}", err=True)
        code = 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)
