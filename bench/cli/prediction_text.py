"""How it is told what is predicted of a sweep's points: memory, time, node-hours. What is unknown is called so."""

from collections.abc import Iterator
from typing import Any

from bench import launchers
from bench.formatting import format_count
from bench.measure import environment
from bench.predict.memory import PROCESS_BYTES
from bench.spec import RunSpec, read_protocol
from bench.sweep.definition import SweepDefinition, SweepPoint
from bench.sweep.duration import AttemptMinutes, compute_minutes
from bench.sweep.feasible import is_far_out_of_memory
from bench.sweep.forecast import Forecast, MemoryForecast, explain_unpredicted

_NOTHING = Forecast()


class PredictionText:
    """The predictions of one sweep."""

    def __init__(self, sweep: SweepDefinition) -> None:
        self._sweep = sweep
        self._minutes = [_compute_minutes(point) for point in sweep.points]
        self._infeasible = [
            sweep.rules.prune and is_far_out_of_memory(point.forecast, sweep.machines[point.machine])
            for point in sweep.points
        ]

    def infeasible(self, index: int) -> bool:
        """Whether a point is not to be run."""
        return self._infeasible[index]

    def line(self, index: int) -> str:
        """Return what is predicted of one point, in one line."""
        point = self._sweep.points[index]
        if (point.forecast or _NOTHING) == _NOTHING and (
            why := explain_unpredicted(RunSpec.model_validate(point.spec))
        ):
            return f"    {why}"
        step = (point.forecast or _NOTHING).step
        time = "step time unknown"
        if step and (taken := self._minutes[index]):
            span = _format_range(taken.low, taken.high)
            time = f"{step.s:.3g} s a step ({step.low_s:.3g}–{step.high_s:.3g}), {span} min"
        return f"    predicted: {self._memory(index)}; {time}"

    def _memory(self, index: int) -> str:
        point = self._sweep.points[index]
        room, machine = (point.forecast or _NOTHING).room, self._sweep.machines[point.machine]
        there = machine.memory_bytes
        if room is None:
            return "memory unknown"
        needed = f"{_format_range(room.low_bytes / 1e9, room.high_bytes / 1e9)} GB"
        if there is None and machine.device == "cpu" and not launchers.load(self._sweep.launcher["name"]).QUEUES:
            return f"{needed} in each rank, {_format_on_this_host(room, point.devices_per_node)}"
        if there is None:
            return f"{needed} (the device's memory is unknown)"
        verdict = "far out of memory, infeasible" if self._infeasible[index] else room.fits(there)
        return f"{needed} of {there / 1e9:.3g} ({verdict})"

    def plain(self, index: int) -> dict[str, Any]:
        """Return the same for another program; None is unknown."""
        point = self._sweep.points[index]
        found, there = point.forecast or _NOTHING, self._sweep.machines[point.machine].memory_bytes
        taken = self._minutes[index]
        return {
            "memory_bytes": {"low": found.room.low_bytes, "high": found.room.high_bytes} if found.room else None,
            "machine_memory_bytes": there,
            "fits": {"fits": True, "does not fit": False}.get(found.room.fits(there)) if found.room else None,
            "infeasible": self._infeasible[index],
            "step_s": {"low": found.step.low_s, "likely": found.step.s, "high": found.step.high_s}
            if found.step
            else None,
            "minutes": taken._asdict() if taken else None,
        }

    def format_node_hours(self, times: int = 1) -> str:
        """Return the node-hours that all runs take so many times."""
        known = [(taken, self._sweep.points[i].nodes) for i in self._runs if (taken := self._minutes[i])]
        if len(known) < len(self._runs):
            return "unknown node-hours"
        low, high = (times * sum(taken[end] * nodes for taken, nodes in known) / 60 for end in (0, 1))
        return f"{_format_range(low, high)} node-hours"

    def summary(self) -> Iterator[str]:
        """Yield lines on the sweep as a whole."""
        runs = self._runs
        known = [(taken, self._sweep.points[i].nodes) for i in runs if (taken := self._minutes[i])]
        if known:
            low, high = (sum(taken[end] * nodes for taken, nodes in known) / 60 for end in (0, 1))
            unknown = f", {len(runs) - len(known)} unknown" if len(known) < len(runs) else ""
            yield f"predicted: {_format_range(low, high)} node-hours for {format_count(len(known), 'point')}{unknown}"
        if left := len(self._sweep.order) - len(runs):
            points = format_count(left, "point")
            yield f"predicted far out of memory: {points} recorded as infeasible; --no-prune runs all"
        yield from self.warnings()

    def warnings(self) -> Iterator[str]:
        """Yield lines on what may go wrong as it is asked."""
        if short := sum(map(self._may_run_out, self._runs)):
            yield f"{format_count(short, 'point')} may need more than the time limit: give launcher.time_limit_min"

    @property
    def _runs(self) -> list[int]:
        """Points that are run, each as often as it is."""
        return [index for _, index in self._sweep.order if not self._infeasible[index]]

    def _may_run_out(self, index: int) -> bool:
        limit, taken = self._sweep.points[index].time_limit_min, self._minutes[index]
        return limit is not None and taken is not None and taken.high > limit


def _format_on_this_host(room: MemoryForecast, ranks: int) -> str:
    """Return what all ranks take of this host with their processes, and whether that fits."""
    low, high = PROCESS_BYTES["cpu"]
    all_ranks = MemoryForecast(
        low_bytes=ranks * (room.low_bytes + low),
        high_bytes=ranks * (room.high_bytes + high),
        tensor_bytes=ranks * room.tensor_bytes,
    )
    there = environment.read_host_memory_bytes()
    span = _format_range(all_ranks.low_bytes / 1e9, all_ranks.high_bytes / 1e9)
    return f"{span} GB of {there / 1e9:.3g} here with {format_count(ranks, 'rank')} ({all_ranks.fits(there)})"


def _compute_minutes(point: SweepPoint) -> AttemptMinutes | None:
    step = (point.forecast or _NOTHING).step
    return compute_minutes(read_protocol(point.spec["measure"]), step.low_s, step.high_s) if step else None


def _format_range(low: float, high: float) -> str:
    """Return a range in three digits, or one number where both ends read the same."""
    ends = [f"{end:.3g}" if end < 1000 else f"{end:.0f}" for end in (low, high)]
    return "–".join(dict.fromkeys(ends))
