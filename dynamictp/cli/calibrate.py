"""`dynamictp calibrate`: measure a running server, for `dynamictp plan --calibration`."""

from __future__ import annotations

from pathlib import Path

import click

from dynamictp.errors import ConfigError


@click.command()
@click.argument("url")
@click.option("--model", default="demo", show_default=True, help="the model it serves, as for `plan`")
@click.option("--degrees", default="1,2", show_default=True, help="TP degrees to measure, one domain each")
@click.option("--out", type=click.Path(dir_okay=False), default="calibration.json", show_default=True)
def calibrate(url: str, model: str, degrees: str, out: str) -> None:
    """Measure step times of the idle DynamicTP server at URL, for `plan --calibration`.

    Takes about a minute a degree. The server must run on this computer, and its layout is changed: let
    nothing else use it meanwhile.
    """
    from dynamictp.advisor import local  # noqa: PLC0415  (help stays instant)
    from dynamictp.advisor.calibrate import Calibrator  # noqa: PLC0415
    from dynamictp.advisor.catalogue import open_shape  # noqa: PLC0415

    try:
        wanted = tuple(int(degree) for degree in degrees.split(","))
    except ValueError as error:
        raise ConfigError(f"--degrees {degrees}: expected degrees such as 1,2") from error
    if min(wanted) < 1:
        raise ConfigError(f"--degrees {degrees}: degrees start at 1")
    machine, limits = local.local_machine(max(wanted))
    calibrator = Calibrator(
        url, open_shape(model), machine, limits=limits, assumptions=local.ASSUMPTIONS, say=click.echo
    )
    calibrator.calibrate(wanted).save(Path(out))
    click.echo(f"wrote {out}; use it with `dynamictp plan {model} --device local --calibration {out}`")
