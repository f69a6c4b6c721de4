"""Small sets of test cases that cover all pairs: any two values of two fields occur together in at least one case,
unless no possible case has both values."""

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

from pipeline_specs import SHAPES, drop, pad, spec

from bench.core.spec import RunSpec

PLACEMENTS = {
    "whole": ("", 1, 1), "one stage": ("1f1b", 1, 1),
    "gpipe, 2 ranks": ("gpipe", 2, 1), "gpipe, 4 ranks": ("gpipe", 4, 1),
    "1f1b, 2 ranks": ("1f1b", 2, 1), "1f1b, 4 ranks": ("1f1b", 4, 1),
    "interleaved, 2 × 2 stages": ("interleaved", 2, 2), "interleaved, 2 × 3 stages": ("interleaved", 2, 3),
    "breadth-first, 1 × 2 stages": ("breadth_first", 1, 2), "breadth-first, 1 × 6 stages": ("breadth_first", 1, 6),
    "breadth-first, 2 × 2 stages": ("breadth_first", 2, 2), "breadth-first, 2 × 3 stages": ("breadth_first", 2, 3),
}  # fmt: skip
"""Pipeline layouts by name. A layout is the schedule, the number of pipeline ranks, and the number of stages
per rank."""
SLICES = {"whole": (1, False), "2": (2, False), "2 by tokens": (2, True), "4": (4, False)}
MOST_RANKS = 8


class Case(NamedTuple):
    """A distributed training that is compared with the same training in one process. It is given by a value for each
    field, such as engine, number of model copies and precision."""

    engine: str
    placement: str
    copies: int
    slices: str
    sharding: str
    family: str
    precision: str
    samples: str
    dropout: str

    @property
    def ranks(self) -> int:
        return PLACEMENTS[self.placement][1] * self.copies * SLICES[self.slices][0]

    @property
    def is_possible(self) -> bool:
        """True if the engine supports the case, and the case is not the same run as another case. For example, zero3 is
        excluded for a single copy of the model, because states can only be partitioned among several copies."""
        whole = self.placement == "whole"
        divided = self.sharding == "zero3"
        fits = 1 < self.ranks <= MOST_RANKS and not (self.family == "llama" and self.slices == "4")
        if self.engine == "pipeline" and self.dropout != "none":
            return False
        if self.engine != "pipeline":
            return fits and whole and self.slices == "whole" and not divided
        alone = self.placement == "one stage" and self.slices == "whole"
        return fits and not whole and not alone and (self.copies > 1 or not divided)

    def build_spec(self) -> RunSpec:
        schedule, pipeline, stages = PLACEMENTS[self.placement]
        tensor, by_tokens = SLICES[self.slices]
        made = spec(
            self.family, schedule, pipeline, stages, self.copies, tensor, by_tokens, self.sharding, self.engine,
            precision=self.precision,
        )  # fmt: skip
        made = pad(made) if self.samples == "padded" else made
        return made if self.dropout == "none" else drop(made)


def list_cases() -> list[Case]:
    """Return all possible cases."""
    fields = (
        ("pipeline", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"), PLACEMENTS, (1, 2, 4), SLICES,
        ("zero1", "zero3"), SHAPES, ("fp32", "bf16"), ("full", "padded"),
        ("none", "dropout"),
    )  # fmt: skip
    return [case for values in itertools.product(*fields) if (case := Case(*values)).is_possible]


def choose_cases(seed: int, tried: int = 400) -> list[Case]:
    """Return a set of cases that covers all pairs and depends only on `seed`. Cases are chosen one after another. For
    each choice, `tried` random cases are drawn. The case with the most pairs of values that are not covered yet is
    chosen."""
    dice, cases = random.Random(seed), list_cases()
    left = {pair for case in cases for pair in list_pairs(case)}
    chosen = list[Case]()
    while left:
        candidates = dice.sample(cases, min(tried, len(cases)))
        best = max(candidates, key=lambda case: len(left & list_pairs(case)))
        if not (found := left & list_pairs(best)):
            best = next(case for case in cases if left & list_pairs(case))
            found = left & list_pairs(best)
        left -= found
        chosen.append(best)
    return chosen


Pair = tuple[tuple[int, str | int], ...]
"""Two fields of a case, each as its index and its value."""


def list_pairs(case: Sequence[str | int]) -> set[Pair]:
    """Return all pairs of values of two different fields of a case."""
    return set(itertools.combinations(enumerate(case), 2))
