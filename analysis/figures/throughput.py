"""Throughput against micro-batch, up to the micro-batch that runs out of memory."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.results import Results

TITLE = "Throughput by micro-batch"
ALT = "Tokens per second against micro-batch, a curve per engine, a panel per question."
PLACE = 1

_QUANTITY = PlottedQuantity("tokens_per_s", "tokens/s, padding included", thousands=True)


def picture(results: Results) -> Picture:
    """Return tokens/s of all ranks, of every kind and with padding, with intervals where known."""
    return build_picture(results, groups.group_by_question(results.summary), _QUANTITY)
