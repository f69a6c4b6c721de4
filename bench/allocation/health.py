"""Which nodes of an allocation are not fit to measure on, by what the runs on them showed."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.record import RunRecord
from bench.runtime.outcome import RankState
from bench.stragglers import find_slow_links
from bench.sweep import jobs
from bench.sweep.jobs import Exclusion

_CONFIRMED = 2  # runs in a row that show the same; one may have met somebody else's traffic
_SLOWED_SHARE = 0.02  # of the window
_SLOWED_BY_HARDWARE = 0x08 | 0x40 | 0x80  # NVML's reasons: hardware slowdown, thermal, power brake


class NodeHealth:
    """Looks at every run of an allocation; what two runs in a row show goes on the study's list, and so does a node at
    once where a rank cannot be ended."""

    def __init__(self, study_folder: Path) -> None:
        self._folder = study_folder
        self._seen: dict[str, list[str]] = {}
        self._excluded: list[Exclusion] = []

    def examine(self, record: RunRecord | None, left: Sequence[RankState], attempt_folder: Path) -> None:
        """Take in one run, and the ranks that it `left` behind."""
        run = f"{attempt_folder.parent.name}/{attempt_folder.name}"
        for state in left:
            self._exclude(state.host, f"process {state.pid}, rank {state.rank} of a run, cannot be ended", [run])
        shown = find_defects(record) if record else {}
        self._seen = {host: [*self._seen.get(host, []), run] for host in shown}
        for host, reason in shown.items():
            if len(self._seen[host]) >= _CONFIRMED:
                self._exclude(host, reason, self._seen[host])

    def _exclude(self, host: str, reason: str, runs: Sequence[str]) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._excluded.append(Exclusion(host=host, reason=reason, runs=tuple(runs), at=at))
        jobs.write_exclusion(self._folder, self._excluded[-1])

    def format_excluded(self) -> str | None:
        """Return why this allocation is no good any more, or None."""
        return "; ".join(f"{found.host}: {found.reason}" for found in self._excluded) or None


def find_defects(record: RunRecord) -> dict[str, str]:
    """Return what a run shows against its hosts: a link beside the others', a device that its hardware slows down."""
    if not record.environment or not record.observations:
        return {}
    hosts, found = record.environment.hosts, {}
    if link := record.observations.link:
        best = max((rate for rate in link.nodes_bytes_per_s if rate is not None), default=0.0)
        for node in find_slow_links(link.nodes_bytes_per_s):
            rate = link.nodes_bytes_per_s[node] or 0.0
            found[hosts[node]] = f"its link carried {rate / 1e6:.1f} MB/s where others carried up to {best / 1e6:.1f}"
    window_s = record.observations.steps.window_s if record.observations.steps else 0.0
    for use in record.observations.device_use or ():
        if (use.thermal_throttled_s or 0.0) > _SLOWED_SHARE * window_s > 0:
            host = hosts[use.rank // record.spec.devices_per_node]
            found[host] = (
                f"the device of rank {use.rank} was held back by its temperature for {use.thermal_throttled_s:.1f} s"
            )
    for number, device in enumerate(record.environment.devices_after):  # of the first node
        if (device.get("throttle_reasons") or 0) & _SLOWED_BY_HARDWARE:
            found[hosts[0]] = f"the hardware slowed its device {number} down ({device['throttle_reasons']:#x})"
    return found
