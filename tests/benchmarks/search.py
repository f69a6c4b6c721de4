"""How many trials a search takes, and how long it thinks: replays on published steps, beside random search.

python -m tests.benchmarks.search [--seeds 200] [--trials 200] [--ways random]

The grids are the 720 published steps of GPT on 2 to 8 A100 (results/published/gpt_single_node_a100.csv and the rows set
aside from it) beside their predictions: one grid for each width, over layers, tensor, pipeline, data, micro-batch and
accumulation. Sought are the most layers times samples by GPU and second. Every replay measures each point with noise of
its own, as wide as the intervals of the runs in results/measured/two_cores.zip/step_time. Counted are the trials until
a point was tried whose published step is within 2 % of the grid's best.

Two thirds of these rows were looked at when the formulas were made, so the same is told of predictions that are off by
a factor drawn for each technique, normal in log with a deviation of 0.5, and without any predictions.
"""

import argparse
import csv
import math
import random
import re
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench import store
from bench.machine import Machine
from bench.quantities import RunQuantities, derive_quantities
from bench.search.candidates import CandidatePool
from bench.search.planning import build_proposer
from bench.search.proposers import ListProposer, PriorProposer
from bench.search.space import SearchSpace, format_key
from bench.search_section import SAMPLERS, SearchSection
from bench.spec import RunSpec
from bench.sweep.definition import SweepPoint, Trial
from bench.sweep.forecast import Forecast, StepForecast
from bench.sweep.policy import Proposer, TrialResult

RESULTS = Path(__file__).parents[2] / "results"
FILES = ("gpt_times.csv", "gpt_times_aside.csv")
WHAT = re.compile(
    r"width (?P<width>\d+), (?P<layers>\d+) layers, tensor (?P<tensor>\d+), pipeline (?P<pipeline>\d+), "
    r"data (?P<data>\d+), micro-batch (?P<micro>\d+) × (?P<accumulation>\d+)"
)
CLOSE = 0.02
TECHNIQUES = ("ddp", "tensor", "pipeline")
MACHINE = Machine(name="a100", device="cuda")
WAYS = ("predictions", "predictions off", "no predictions", "random")


class Row(NamedTuple):
    """A published step beside its prediction, in seconds by layer."""

    values: dict[str, Any]
    predicted_s: float
    measured_s: float

    @property
    def rate(self) -> float:
        """Layers times samples by GPU and second."""
        at = self.values
        gpus = at["tensor"] * at["pipeline"] * at["data"]
        return float(at["micro"] * at["accumulation"] * at["data"] / self.measured_s / gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--trials", type=int, default=200, help="of a replay, at the most")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS, help="of searching")
    args = parser.parse_args()
    noise = read_noise()
    print(f"noise of a run: {100 * noise:.2g} %, half the width of the median interval of recorded runs")
    for width, rows in read_grids().items():
        close = sum(row.rate >= (1 - CLOSE) * max(one.rate for one in rows.values()) for row in rows.values())
        print(f"width {width}: {len(rows)} points, {close} of them within {100 * CLOSE:g} % of the best")
        for way in args.ways:
            counts = [replay(rows, way, seed, noise, args.trials) for seed in range(args.seeds)]
            print(f"  {way:<22}{describe(counts, len(rows))}", flush=True)
    for sampler in SAMPLERS:
        print(f"a proposal by {sampler} at 1,000 trials of 2,000 points: {time_proposal(sampler):.3f} s", flush=True)


def describe(counts: list[tuple[int | None, int]], points: int) -> str:
    """Return the trials to a close point over all replays, and those until the search ended by itself."""
    found = sorted(count for count, _ in counts if count is not None)
    middle, slow = (_find_quantile(found, len(counts), part) for part in (0.5, 0.95))
    ended = statistics.median(end for _, end in counts)
    share = "" if middle is None else f" ({100 * middle / points:.1f} % of the grid)"
    return (
        f"close after {middle or 'more'} trials{share}, in 95 % of replays after {slow or 'more'}, "
        f"found in {len(found)} of {len(counts)}; ended after {ended:g}"
    )


def _find_quantile(found: list[int], replays: int, part: float) -> int | None:
    """Return how many trials this part of all replays needed at the most; None where fewer came close."""
    place = math.ceil(part * replays) - 1
    return found[place] if place < len(found) else None


def read_noise() -> float:
    """Return half the relative width of the median interval of recorded runs."""
    records = (store.read_record(path) for path in store.find_records([RESULTS / "measured/two_cores.zip/step_time"]))
    found = (derive_quantities(record) for record in records)
    return statistics.median(
        (one.high_s - one.low_s) / one.step_s / 2 for one in found if one and one.low_s is not None and one.high_s
    )


def read_grids() -> dict[int, dict[str, Row]]:
    """Return the published steps by width and by the key of their values."""
    grids: dict[int, dict[str, Row]] = {}
    for name in FILES:
        with (RESULTS / "predictions" / name).open(newline="") as file:
            for line in csv.DictReader(file):
                match = WHAT.fullmatch(line["what"])
                assert match, line["what"]
                values = {key: int(text) for key, text in match.groupdict().items()}
                width, layers = values.pop("width"), values["layers"]
                row = Row(values, float(line["predicted"]) / layers, float(line["truth"]) / layers)
                grids.setdefault(width, {})[format_key(values)] = row
    return grids


def replay(rows: Mapping[str, Row], way: str, seed: int, noise: float, most: int) -> tuple[int | None, int]:
    """Return the number of the first trial that was close to the best, None if none was, and the number of trials."""
    generator, best = random.Random(seed), max(row.rate for row in rows.values())
    measured = {key: row.measured_s * generator.lognormvariate(0, noise / 1.96) for key, row in rows.items()}
    factors = {technique: generator.lognormvariate(0, 0.5) for technique in TECHNIQUES}
    section = SearchSection.model_validate(
        {
            "objective": "samples_per_node_hour",
            "space": {"row": list(range(len(rows)))},
            "seed": seed,
            "trials": len(rows) if way == "random" else min(most, len(rows)),
        }
    )

    def build(values: Mapping[str, Any]) -> SweepPoint:
        row = rows[format_key(values)]
        factor = factors[find_technique(values)] if way == "predictions off" else 1.0
        return build_point(values, None if way == "no predictions" else factor * row.predicted_s)

    pool = CandidatePool(section, _RowSpace(section, rows), build, MACHINE)
    proposer: Proposer = ListProposer(pool, at_random=True) if way == "random" else PriorProposer(pool)
    results: list[TrialResult] = []
    first = None
    while proposal := proposer.propose(results):
        key = proposal.point.config_id
        results.append(build_result(len(results), proposal.point, proposal.values, measured[key], noise))
        if first is None and rows[key].rate >= (1 - CLOSE) * best:
            first = len(results)
            if way == "random":
                break
    return first, len(results)


class _RowSpace(SearchSpace):
    """The rows of a table, which is no full product of its fields."""

    def __init__(self, section: SearchSection, rows: Mapping[str, Row]) -> None:
        super().__init__(section)
        self._rows = rows

    def list_candidates(self, seed: int, most: int = 0) -> list[dict[str, Any]]:
        return [row.values for row in self._rows.values()]


def find_technique(values: Mapping[str, Any]) -> str:
    """Return how a row divides its ranks."""
    return "pipeline" if values["pipeline"] > 1 else "tensor" if values["tensor"] > 1 else "ddp"


def build_point(values: Mapping[str, Any], predicted_s: float | None) -> SweepPoint:
    """Return a row as a point: a GPU is a node, and how it is divided its technique."""
    gpus = values["tensor"] * values["pipeline"] * values["data"]
    spec = {
        "model": {"name": "gpt", "family": "gpt", "shape": {}},
        "engine": {"name": find_technique(values), "backend": "pipeline"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": values["micro"], "accumulation": values["accumulation"]},
        "parallel": {"tensor": values["tensor"], "pipeline": values["pipeline"]},
        "nodes": gpus,
    }
    step = None if predicted_s is None else StepForecast(low_s=predicted_s, s=predicted_s, high_s=predicted_s)
    return SweepPoint(
        config_id=format_key(values),
        line="",
        machine="a100",
        nodes=gpus,
        devices_per_node=1,
        time_limit_min=None,
        forecast=Forecast(step=step),
        overrides=(),
        spec=RunSpec.model_validate(spec).model_dump(mode="json", by_alias=True),
    )


def build_result(number: int, point: SweepPoint, values: Mapping[str, Any], step_s: float, noise: float) -> TrialResult:
    """Return a trial that has run."""
    batch = point.spec["batch"]
    low, high = step_s * (1 - noise), step_s * (1 + noise)
    quantities = RunQuantities(step_s, low, high, batch["global"], None, point.nodes, None, None)
    return TrialResult(Trial(number=number, point=point, values=dict(values)), "ok", quantities)


def time_proposal(sampler: str) -> float:
    """Return the processor seconds of one proposal after 1,000 trials, the median of five after a first."""
    space = {"layers": list(range(1, 21)), "micro": list(range(1, 21)), "accumulation": [1, 2, 3, 4, 5]}
    section = SearchSection.model_validate(
        {"objective": "samples_per_s", "space": space, "sampler": sampler, "trials": 5_000, "gain": 0}
    )
    generator = random.Random(0)

    def build(values: Mapping[str, Any]) -> SweepPoint:
        return build_point({"tensor": 1, "pipeline": 1, "data": 1, **values}, generator.uniform(1, 2))

    pool = CandidatePool(section, SearchSpace(section), build, MACHINE)
    proposer = build_proposer(pool)
    chosen = random.Random(1).sample(pool.list_all(), 1_000)
    results = [
        build_result(number, one.point, one.values, generator.uniform(1, 2), 0.01) for number, one in enumerate(chosen)
    ]
    times = []
    for _ in range(6):
        begin = time.process_time()
        assert proposer.propose(results)
        times.append(time.process_time() - begin)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
