"""Figure of throughput against micro-batch, up to the micro-batch that runs out of memory."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.results import Results

TITLE = "Throughput by micro-batch"
ALT = "Tokens per second against micro-batch, with a curve per engine and a panel per question."
NEEDS = "runs without background load, or failed runs"
PLACE = 1

_QUANTITY = PlottedQuantity("tokens_per_s", "tokens/s, padding included", thousands=True)


def picture(results: Results) -> Picture:
    """Return the figure of tokens per second of all ranks together against micro-batch, with intervals if known.
    Encoder, decoder and padding tokens all count."""
    return build_picture(results, groups.group_by_question(results.summary), _QUANTITY)
