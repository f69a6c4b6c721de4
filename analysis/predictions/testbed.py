"""Recorded steps on the testbed at several link rates, and what is predicted of each."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from analysis import results
from analysis.predictions import estimators
from analysis.predictions.recorded import RecordedRuns
from analysis.table import list_rows
from bench.formatting import format_count
from bench.machine import Machine
from bench.predict.step_time import predict_step_time
from bench.predict.step_time.network import change_link_speed
from bench.predict.step_time.rates import read_rates
from bench.spec import RunSpec
from bench.store import find_records, read_record

RATES: dict[str, float] = {"100mbit": 12.5e6, "400mbit": 50e6, "1gbit": 125e6}
"""Link rates of the recorded runs, in bytes/s."""
SLOW, FAST = "100mbit", "1gbit"
"""Where collectives were calibrated. Chosen before anybody had looked at a step time; none was calibrated with."""
STUDY = "step_time"

Place = tuple[str, int]
"""Engine and nodes."""


class PredictedStep(NamedTuple):
    """A configuration at one link rate. Its step in seconds: as measured, the median over allocations with its
    interval; as predicted from rehearsals with its interval, and from calibrated rates alone; by 6·N·tokens at the rate
    of the best product."""

    rate: str
    engine: str
    nodes: int
    step_s: float
    low: float
    high: float
    predicted_s: float
    predicted_low: float
    predicted_high: float
    by_rates_s: float
    rule_of_thumb_s: float

    @property
    def inside(self) -> bool:
        """Whether the step took what was predicted from rehearsals, doubt included."""
        return self.predicted_low <= self.step_s <= self.predicted_high

    @property
    def where(self) -> str:
        """Link rate and nodes, in words."""
        return f"{self.rate}, {format_count(self.nodes, 'node')}"


def predict_steps(recorded: RecordedRuns) -> list[PredictedStep]:
    """Return every recorded configuration, by link rate, engine and nodes."""
    slow, fast = _read_machine(recorded, SLOW), _read_machine(recorded, FAST)
    computing = _read_rehearsed_seconds(recorded)
    found: list[PredictedStep] = []
    for rate, speed in RATES.items():
        machine = slow if rate == SLOW else change_link_speed(slow, fast, speed)
        found += _list_predicted_steps(recorded.runs / STUDY / rate, machine, computing)
    return found


def _list_predicted_steps(folder: Path, machine: Machine, computing: Mapping[Place, float]) -> Iterator[PredictedStep]:
    found = results.read([folder])
    for row in sorted(list_rows(found.summary), key=lambda row: (row["engine"], row["nodes"])):
        spec, place = found.specs[row["config_id"]], (row["engine"], row["nodes"])
        measured = row["step_s"], row["step_s_low"], row["step_s_high"]
        by_rehearsal, by_rates = (
            predict_step_time(spec, machine, "cpu", rehearsed_s=s) for s in (computing[place], None)
        )
        predicted = by_rehearsal.step_s, by_rehearsal.low_s, by_rehearsal.high_s
        rule_of_thumb_s = _estimate_step_s(spec, row["parameters"], machine)
        yield PredictedStep(folder.name, *place, *measured, *predicted, by_rates.step_s, rule_of_thumb_s)


def _estimate_step_s(spec: RunSpec, parameters: int, machine: Machine) -> float:
    tokens = spec.batch.micro * spec.accumulation * spec.tokens_per_sample
    best = read_rates(machine.model_dump_json(), spec.precision, "cpu").ceiling
    return estimators.estimate_flops(parameters, tokens) / best


def _read_machine(recorded: RecordedRuns, rate: str) -> Machine:
    plain_yaml = (recorded.inputs / f"bed_{rate}.yaml").read_text(encoding="utf-8")
    return Machine.model_validate(yaml.safe_load(plain_yaml))


def _read_rehearsed_seconds(recorded: RecordedRuns) -> dict[Place, float]:
    """Return the seconds that a step computes: the median over rehearsals of one rank alone on the machine."""
    medians: dict[Place, list[float]] = {}
    steps = recorded.runs / STUDY
    for path in find_records([steps / "rehearsals", steps / "rehearsals_again"]):
        record = read_record(path)
        assert record.observations is not None  # all of them ended ok
        place = record.spec.engine.name, record.spec.nodes
        medians.setdefault(place, []).append(statistics.median(record.observations.compute_s))
    return {place: statistics.median(of) for place, of in medians.items()}
