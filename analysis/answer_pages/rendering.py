"""What both pages share: a figure as an element of the page, and the words of a point."""

import io
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from analysis.figures import inline_svg
from analysis.plotting import STYLE
from bench.formatting import describe_layout, describe_lengths, format_count
from bench.spec import RunSpec

WIDTH_IN = 4.2
"""Of a figure: so narrow that its letters can be read where the page is 400 px wide."""


def render_figure(name: str, figure: Figure, alt: str) -> Markup:
    """Return a figure as an element of the page; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Markup(inline_svg(name, buffer.getvalue(), alt))


def list_facts(spec: RunSpec, machine: str) -> dict[str, str]:
    """Return what tells points apart, by the name of a column."""
    return {
        "model": spec.model.name,
        "engine": spec.engine.name,
        "precision": spec.precision,
        "ranks": f"{format_count(spec.nodes, 'node')} × {spec.devices_per_node}",
        "batch": f"micro {spec.batch.micro} × {spec.accumulation}",
        "global batch": f"global {spec.global_batch}",
        "checkpointing": f"{'' if spec.activation_checkpointing else 'no '}checkpointing",
        "layout": describe_layout(spec).strip() or "data-parallel",
        "lengths": describe_lengths(spec),
        "objective": spec.objective,
        "data": spec.data.name,
        "machine": machine,
    }


def find_distinct(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the columns in which points differ."""
    return [name for name in (points[0] if points else ()) if len({point[name] for point in points}) > 1]


def choose_unit(values: Iterable[float], units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Return the first of the units, the largest first, that the largest value fills, else the last."""
    most = max(values, default=0.0)
    return next((unit for unit in units if most >= unit[0]), units[-1])
