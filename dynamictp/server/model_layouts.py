"""Layouts of several models as one text: `big:tp2+small:tp1`, a part for each model. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dynamictp.errors import LayoutRefused
from dynamictp.layout import Layout, LayoutSpec, PlacedShape, Shape, parse_layout
from dynamictp.server.switches import MAX_LAYOUT_CHARS

Parts = dict[str, Layout | LayoutSpec]


def split(text: str, models: Collection[str]) -> Parts:
    """Each named model's layout, without the name. Raises `LayoutRefused` for a shape that names none of
    `models`."""
    if len(text) > MAX_LAYOUT_CHARS:
        raise LayoutRefused(f"a layout has at most {MAX_LAYOUT_CHARS} characters")
    layout = parse_layout(text)
    shapes = layout.spec.shapes if isinstance(layout, Layout) else layout.shapes
    for shape in shapes:
        if shape.model not in models:
            example = "+".join(f"{model}:tp1" for model in models)
            whose = f"'{shape.model}' is no model of this server" if shape.model else "it names no model"
            raise LayoutRefused(f"{shape}: {whose}; this server has several, as in {example}")
    named = dict.fromkeys(model for model in models if any(shape.model == model for shape in shapes))
    if isinstance(layout, Layout):
        return {
            model: Layout(tuple(d for d in layout.domains if d.shape.model == model)).without_models()
            for model in named
        }
    return {
        model: LayoutSpec(tuple(shape for shape in shapes if shape.model == model)).without_models()
        for model in named
    }


def of_model(text: str, model: str) -> str:
    """A model's layout with its name: `tp2` is `big:tp2`. An empty text stays empty."""
    if not text:
        return ""
    layout = parse_layout(text)
    if isinstance(layout, Layout):
        domains = (PlacedShape(_named(domain.shape, model), domain.devices) for domain in layout.domains)
        return str(Layout(tuple(domains)))
    return str(LayoutSpec(tuple(_named(shape, model) for shape in layout.shapes)))


def joined(texts: Mapping[str, str]) -> str:
    """Layouts by model as one text; models without one are left out."""
    return "+".join(of_model(text, model) for model, text in texts.items() if text)


def _named(shape: Shape, model: str) -> Shape:
    return replace(shape, model=model)
