"""Loader process: fills the shared weight mapping while the workers import torch.

`python -m dynamictp.server.loader --model M --dtype bf16 --layout rows --weights "" --fd N --part I/N`. Exits
0 when its part is written, 3 with a sentence on stderr when the model is refused.
"""

from __future__ import annotations

import mmap
import sys
from typing import cast

import click
import numpy as np

from dynamictp.errors import FatalError
from dynamictp.facts import DType, WeightType
from dynamictp.model.load import open_model
from dynamictp.model.weights import WeightLayout, load_weights, plan_weights
from dynamictp.process import die_with_parent


@click.command()
@click.option("--model", required=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), required=True)
@click.option("--layout", type=click.Choice(["rows", "panels"]), default="rows")
@click.option("--weights", type=click.Choice(["", "int8"]), default="")
@click.option("--fd", type=int, required=True)
@click.option("--part", required=True)
def main(*, model: str, dtype: str, layout: str, weights: str, fd: int, part: str) -> None:
    """Write one part of a model's weights into shared memory."""
    die_with_parent()
    index_of_part, parts = map(int, part.split("/"))
    try:
        source = open_model(model)
        index = plan_weights(
            source.facts, cast(DType, dtype), cast(WeightLayout, layout), cast(WeightType, weights)
        )
        # The mapping ends with the process: closing it here would fail while an error still holds views.
        buffer = np.frombuffer(mmap.mmap(fd, index.total_bytes), np.uint8)
        load_weights(source, index, buffer, part=(index_of_part, parts))
    except FatalError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
