"""Layouts as values: which shapes are live on a pool, and on which devices. Pure.

Text forms (`parse_layout`; `LayoutSpec.parse`, `Layout.parse`): `tp2`, `tp1+tp1`, `2*tp1`, `tp6+tp2`,
`tp2pp2`, with a model `big:tp6+small:tp2`, placed `tp2@0,1+tp1@3`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest

from dynamictp.errors import LayoutRefused

MAX_DEGREE = 1024
MAX_DEVICES = 10_000
"""Devices are named by up to four digits; a text that asks for more is refused before it is expanded."""

_TERM = re.compile(
    r"(?:(?P<count>[1-9]\d{0,3})\*)?(?:(?P<model>[A-Za-z][\w.-]*):)?tp(?P<tp>[1-9]\d{0,3})"
    r"(?:pp(?P<pp>[1-9]\d{0,3}))?(?:@(?P<devices>\d{1,4}(?:,\d{1,4})*))?",
    re.ASCII,
)


@dataclass(frozen=True, order=True)
class Shape:
    """One domain's form: `tp` ranks in each of `pp` stages, for `model` (empty: the only one)."""

    tp: int
    pp: int = 1
    model: str = ""

    def __post_init__(self) -> None:
        if not (1 <= self.tp <= MAX_DEGREE and 1 <= self.pp <= MAX_DEGREE):
            raise LayoutRefused(f"degrees go from 1 to {MAX_DEGREE}, not tp{self.tp} pp{self.pp}")

    @property
    def devices(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        model = f"{self.model}:" if self.model else ""
        return f"{model}tp{self.tp}" + (f"pp{self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True)
class LayoutSpec:
    """What a planner or user asks for: a multiset of shapes, kept sorted (widest first)."""

    shapes: tuple[Shape, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.shapes, key=lambda s: (-s.devices, -s.tp, s.model))
        object.__setattr__(self, "shapes", tuple(ordered))

    @classmethod
    def parse(cls, text: str) -> LayoutSpec:
        """Raises `LayoutRefused` for text that is no layout, or one that names devices."""
        shapes: list[Shape] = []
        total = 0
        for shape, count, devices in _terms(text):
            if devices is not None:
                raise LayoutRefused(f"'{text}' names devices; a layout here is shapes only, such as {shape}")
            total += count * shape.devices
            if total > MAX_DEVICES:
                raise LayoutRefused(f"a layout takes at most {MAX_DEVICES} devices, '{text}' takes more")
            shapes.extend([shape] * count)
        return cls(tuple(shapes))

    def without_models(self) -> LayoutSpec:
        """The same shapes without the name of a model, which a server of one model does not need."""
        return LayoutSpec(tuple(replace(shape, model="") for shape in self.shapes))

    @property
    def devices(self) -> int:
        """Devices the layout occupies."""
        return sum(shape.devices for shape in self.shapes)

    def __str__(self) -> str:
        counts = Counter(self.shapes)
        terms: list[str] = []
        for shape, count in counts.items():
            terms.extend([f"{count}*{shape}"] if count > 2 else [str(shape)] * count)
        return "+".join(terms)


@dataclass(frozen=True, order=True)
class PlacedShape:
    """A shape on an ordered tuple of logical devices: rank i runs on `devices[i]`."""

    shape: Shape
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.shape.devices:
            raise LayoutRefused(f"{self.shape} takes {self.shape.devices} devices, not {len(self.devices)}")
        if len(set(self.devices)) != len(self.devices):
            raise LayoutRefused(f"{self.shape} names a device twice: {self.devices}")

    def __str__(self) -> str:
        return f"{self.shape}@{','.join(map(str, self.devices))}"


@dataclass(frozen=True)
class Layout:
    """Placed domains with disjoint devices, ordered by their first device."""

    domains: tuple[PlacedShape, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "domains", tuple(sorted(self.domains, key=lambda d: d.devices)))
        used = [device for domain in self.domains for device in domain.devices]
        twice = [device for device, count in Counter(used).items() if count > 1]
        if twice:
            raise LayoutRefused(f"device {twice[0]} is in two domains of {self}")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Raises `LayoutRefused` for text that is no placed layout."""
        domains = []
        for shape, count, devices in _terms(text):
            if devices is None or count != 1:
                raise LayoutRefused(f"'{text}' is not placed: every shape needs devices, such as {shape}@0")
            domains.append(PlacedShape(shape, devices))
        return cls(tuple(domains))

    @property
    def spec(self) -> LayoutSpec:
        return LayoutSpec(tuple(domain.shape for domain in self.domains))

    def without_models(self) -> Layout:
        """The same domains without the name of a model, which a server of one model does not need."""
        return Layout(tuple(replace(d, shape=replace(d.shape, model="")) for d in self.domains))

    @property
    def devices(self) -> frozenset[int]:
        """Devices in some domain."""
        return frozenset(device for domain in self.domains for device in domain.devices)

    def __str__(self) -> str:
        return "+".join(map(str, self.domains))


def parse_layout(text: str) -> LayoutSpec | Layout:
    """A layout as a person writes it: placed if it names devices, else shapes. Raises `LayoutRefused`."""
    return Layout.parse(text) if "@" in text else LayoutSpec.parse(text)


def _terms(text: str) -> Iterable[tuple[Shape, int, tuple[int, ...] | None]]:
    for term in text.strip().split("+"):
        match = _TERM.fullmatch(term.strip())
        if match is None:
            raise LayoutRefused(f"'{term}' is no shape: expected tp2, 2*tp1, tp2pp2, model:tp2 or tp2@0,1")
        shape = Shape(int(match["tp"]), int(match["pp"] or 1), match["model"] or "")
        devices = tuple(map(int, match["devices"].split(","))) if match["devices"] else None
        yield shape, int(match["count"] or 1), devices


def place(
    spec: LayoutSpec,
    devices: int,
    live: Sequence[PlacedShape],
    *,
    leased: Collection[int] = (),
) -> Layout:
    """Put `spec` on devices 0..`devices`-1 without the `leased` ones, keeping live domains where they are.

    `live` lists the domains to keep when the spec has their shape, the most wanted first (serving before
    draining, so a draining one is revived). The remaining shapes take the free devices in order, widest
    first. Raises `LayoutRefused` when they do not fit.
    """
    if spec.devices > devices:
        raise LayoutRefused(f"{spec} takes {spec.devices} devices; the pool has {devices}")
    if spec.devices > devices - len(leased):
        raise LayoutRefused(
            f"{spec} takes {spec.devices} devices; {len(leased)} of the pool's {devices} are leased"
        )
    wanted = Counter(spec.shapes)
    kept: list[PlacedShape] = []
    taken: set[int] = set(leased)
    for domain in live:
        if wanted[domain.shape] and taken.isdisjoint(domain.devices) and max(domain.devices) < devices:
            wanted[domain.shape] -= 1
            kept.append(domain)
            taken.update(domain.devices)
    free = [device for device in range(devices) if device not in taken]
    for shape in LayoutSpec(tuple(wanted.elements())).shapes:
        kept.append(PlacedShape(shape, tuple(free[: shape.devices])))
        del free[: shape.devices]
    return Layout(tuple(kept))


def spec_of(text: str) -> LayoutSpec:
    """The shapes of a layout's text, whether it names devices or not. Raises `LayoutRefused`."""
    layout = parse_layout(text)
    return layout.spec if isinstance(layout, Layout) else layout


def legal_specs(degrees: Sequence[int], devices: int, *, limit: int = 128) -> tuple[LayoutSpec, ...]:
    """Layouts of tp shapes with the given degrees on at most `devices` devices.

    In order of devices taken, then number of shapes, then widest first. At most `limit` of them, the first
    in that order: the list is for a person, in an error message. The default holds all layouts of 8 devices
    (66 when every degree is legal).
    """
    widths = sorted({degree for degree in degrees if degree <= devices}, reverse=True)
    specs = (
        LayoutSpec(tuple(Shape(width) for width in parts))
        for total in range(1, devices + 1 if widths else 1)
        for count in range(-(-total // widths[0]), total // widths[-1] + 1)
        for parts in _partitions(total, count, widths)
    )
    return tuple(islice(specs, limit))


def planned_specs(degrees: Sequence[int], devices: int, *, limit: int = 128) -> tuple[LayoutSpec, ...]:
    """What a planner chooses from: `legal_specs` where those are at most `limit`, else a choice that spans
    the pool, in the same order.

    All layouts of equal shapes are in it, more than `limit` of them on very large pools. What is left goes to
    mixed ones: to each number of devices in turn, and there to each number of shapes, alike widths first.
    """
    every = legal_specs(degrees, devices, limit=limit + 1)
    if len(every) <= limit:
        return every
    widths = sorted({degree for degree in degrees if degree <= devices})
    equal = [(width,) * count for width in widths for count in range(1, devices // width + 1)]
    mixed = _by_turns(_mixed(total, widths) for total in range(1, devices + 1))
    chosen = [*equal, *islice(mixed, max(0, limit - len(equal)))]
    chosen.sort(key=lambda parts: (sum(parts), len(parts), [-width for width in parts]))
    return tuple(LayoutSpec(tuple(map(Shape, parts))) for parts in chosen)


def _mixed(total: int, widths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    by_count = _by_turns(_partitions(total, count, widths) for count in range(2, total // widths[0] + 1))
    return (parts for parts in by_count if len(set(parts)) > 1)


def _by_turns(many: Iterable[Iterator[tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
    """The first of each, then the second of each, and so on."""
    return (parts for parts in chain.from_iterable(zip_longest(*many)) if parts is not None)


def _partitions(total: int, count: int, widths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Descending tuples of `count` widths with sum `total`; which comes first, the order of `widths` says."""
    if count == 0:
        if total == 0:
            yield ()
        return
    least = (count - 1) * min(widths)
    for width in widths:
        if width + least <= total <= width * count:
            narrower = [other for other in widths if other <= width]
            for rest in _partitions(total - width, count - 1, narrower):
                yield (width, *rest)
