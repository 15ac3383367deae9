"""From a layout's text to the placed layout it asks for, and what is there of a layout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dynamictp.engine.domain import Domain
from dynamictp.engine.fleet import Fleet
from dynamictp.errors import LayoutRefused
from dynamictp.layout import Layout, LayoutSpec, PlacedShape, Shape, legal_specs, parse_layout, place


class Targets:
    """Owner of the set of leased devices, which no target has."""

    def __init__(self, model: str, devices: int, legal: Sequence[int], leased: Collection[int]) -> None:
        self._model = model
        self._devices = devices
        self._legal = tuple(legal)
        self.leased = frozenset(leased)

    def parse(self, text: str, live: Sequence[PlacedShape]) -> Layout:
        """The placed layout that a text asks for, keeping `live` domains (the most wanted first). Raises
        `LayoutRefused`."""
        legal = tuple(map(str, legal_specs(self._legal, self._devices - len(self.leased))))
        try:
            named = parse_layout(text)
            if isinstance(named, Layout):
                layout = Layout(tuple(PlacedShape(self._shape(d.shape), d.devices) for d in named.domains))
            else:
                spec = LayoutSpec(tuple(map(self._shape, named.shapes)))
                layout = place(spec, self._devices, live, leased=self.leased)
        except LayoutRefused as error:
            raise LayoutRefused(error.message, legal=legal) from error
        for device in sorted(layout.devices):
            if device >= self._devices:
                raise LayoutRefused(f"{layout} names a device beyond {self._devices - 1}", legal=legal)
            if device in self.leased:
                raise LayoutRefused(f"{layout} names device {device}, which is leased", legal=legal)
        return layout

    def _shape(self, shape: Shape) -> Shape:
        if shape.pp > 1:
            raise LayoutRefused(f"{shape}: pipeline stages (pp > 1) are not supported yet")
        if shape.model not in {"", self._model}:
            raise LayoutRefused(f"{shape}: model '{shape.model}' is not served here")
        if shape.tp not in self._legal:
            raise LayoutRefused(f"{shape}: degrees legal here are {', '.join(map(str, self._legal))}")
        return Shape(shape.tp)


def keepable(fleet: Fleet) -> list[Domain]:
    """Domains a target may keep: serving ones first, those with most requests first."""
    return sorted(fleet.live(), key=lambda d: (d.state != "serving", -len(d.running) - len(d.leaving)))


def surplus(fleet: Fleet, target: Layout) -> list[Domain]:
    """Serving domains that the target does not have."""
    kept = set(target.domains)
    return [domain for domain in fleet.live() if domain.state == "serving" and domain.placed not in kept]


def missing(fleet: Fleet, layout: Layout) -> list[PlacedShape]:
    """What of the layout no domain serves."""
    served = {domain.placed for domain in fleet.live() if domain.state == "serving"}
    return [placed for placed in layout.domains if placed not in served]
