"""What is said of a whole training: the tokens that a loss takes, and the goodput."""

from collections.abc import Iterator

from bench.advising.length import LAW
from bench.advising.search import Answer
from bench.formatting import format_interval
from bench.predict.advice import AdviceQuestion, format_hours
from bench.predict.advice.choices import Choice
from bench.predict.scaling_laws import KAPLAN, find_law
from bench.predict.workload import get_network
from bench.sweep import inputs

_LONG_H = 24
"""Hours from which a training on GPUs is said to be without failures where these are not counted."""


def list_rows(question: AdviceQuestion, winner: Choice) -> list[tuple[str, str]]:
    """Return rows on tokens, where they follow from a loss, and on goodput, where it is known."""
    rows, need, goodput = [], question.need, question.predict_goodput(winner)
    if need:
        tokens = f"{need.compute_tokens(winner.time.tokens):.3g}, {need.least_tokens:.3g} with tiny batches"
        batch = f"{winner.time.tokens:,} tokens of {need.critical_batch:,.0f}, the critical one"
        rows += [("tokens", tokens), ("batch", batch)]
    if goodput:
        share = format_interval(*(100 * part for part in (goodput.share, goodput.low, goodput.high)))
        interval = f"a checkpoint every {_format_time(goodput.interval_s)}"
        rows.append(("goodput", f"{share} %, {interval}, a failure every {_format_time(goodput.mtbf_s)}"))
    return rows


def list_caveats(answer: Answer) -> Iterator[str]:
    """Yield what tokens and hours stand on."""
    question, winner = answer.query.question, answer.advice.winner
    if question.need:
        law = find_law(answer.query.training.law or LAW)
        batch = "" if law is KAPLAN else f", the critical batch by {KAPLAN.source}"
        yield f"Tokens to a loss are by {law.source}{batch}: of decoders, on their text with their tokenizer."
        if len(get_network(winner.spec).stacks) > 1:
            yield "No law of these is of an encoder with a decoder: a rough guess here."
    hours = question.predict_hours(winner)
    if (goodput := question.predict_goodput(winner)) is not None:
        yield f"Goodput is by the failure rate of {goodput.source}; hours and costs are with failures."
    elif hours and hours.likely >= _LONG_H and inputs.find_predicted_device(answer.request) == "cuda":
        yield "Hours are those of a job that never fails: say storage=2e9, in bytes per second, to count failures."


def _format_time(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds < 7200 else format_hours(seconds / 3600)
