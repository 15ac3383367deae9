"""Samples of `/metrics` as plain numbers, by the names that benchmark results keep them under."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

MODEL = "model_name"
_LABEL = re.compile(r"\{([a-zA-Z_]\w*)=([^}]*)\}")


def parse_samples(text: str) -> dict[str, float]:
    """`name{label=value}{…}` with sorted labels → value, without histogram buckets. Raises ValueError."""
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): float(
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


@dataclass(frozen=True)
class Samples:
    """Samples at one moment, or the difference between two."""

    values: Mapping[str, float] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return any(key == name or key.startswith(f"{name}{{") for key in self.values)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name which have these labels; 0 when there is none."""
        return sum(value for found, value in self._named(name) if labels.items() <= found.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for found, value in self._named(name):
            if label in found and labels.items() <= found.items():
                sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def since(self, before: Samples) -> Samples:
        """What was added since `before`. A counter that fell has started again: then what it has now."""
        return Samples(
            {
                key: value - before.values[key] if value >= before.values.get(key, value + 1) else value
                for key, value in self.values.items()
            }
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models of a server that has several; of one with one model none.

        Its figures under other servers' names have the label in any case.
        """
        ours = (dict(_LABEL.findall(key)) for key in self.values if key.startswith("dtp_"))
        found = {labels.get(MODEL, "") for labels in ours}
        return tuple(sorted(found - {""}))

    def of_model(self, name: str) -> Samples:
        """Those of that model and those that belong to none, such as the machine's."""
        others = f"{{{MODEL}="
        mine = f"{{{MODEL}={name}}}"
        return Samples({key: value for key, value in self.values.items() if mine in key or others not in key})

    def _named(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for key, value in self.values.items():
            if key == name:
                yield {}, value
            elif key.startswith(f"{name}{{"):
                yield dict(_LABEL.findall(key)), value
