"""`python -m dynamictp.worker`: started by the supervisor, which passes the descriptors."""

from __future__ import annotations

import click

from dynamictp.process import die_with_parent, ignore_interrupt


@click.command()
@click.option("--weights-fd", type=int, required=True)
@click.option("--arena-fd", type=int, required=True)
@click.option("--exchange-fd", type=int, required=True)
@click.option("--control-fd", type=int, required=True)
@click.option("--orders-fd", type=int, required=True)
def main(orders_fd: int, **descriptors: int) -> None:
    """Serve one device, once there are orders to; until then be a spare."""
    # Before the two seconds that importing torch takes: a parent killed meanwhile must not leave us behind.
    die_with_parent()
    ignore_interrupt()
    from dynamictp.worker.process import Descriptors, run_worker  # noqa: PLC0415

    run_worker(
        orders_fd,
        Descriptors(**{name.removesuffix("_fd"): number for name, number in descriptors.items()}),
    )


if __name__ == "__main__":
    main()
