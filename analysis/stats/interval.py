"""An interval with what a reader must know before believing it."""

from typing import Literal, NamedTuple

Kind = Literal["within the run", "within the runs", "between repeats", "range of repeats"]


class Interval(NamedTuple):
    """Where a value lies with probability `level`.

    Within a run it tells what more steps of that run would give, not what another run would; only between repeats it
    tells the latter. `n` is the steps or the repeats that it rests on, of both sides where two are compared.
    """

    low: float
    high: float
    kind: Kind
    level: float
    n: int
