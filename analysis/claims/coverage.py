"""What of the study's settings a set of runs covers, in words."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from analysis.claims import rule
from analysis.results import Results
from analysis.table import list_rows
from bench.spec import RunSpec


def covered(claim: str, results: Results) -> str:
    """Return what of the setting that a claim states was measured; empty for a claim that nothing is known of."""
    measured = [row for row in list_rows(results.table) if row["evidence"] == "measured"]
    specs = [results.specs[row["config_id"]] for row in measured]
    if claim == "C4":
        return _models({row["model"]: row["parameters"] for row in measured})
    return "; ".join(f"{name} {_listed(map(of, specs))}" for name, of in _SETTINGS.get(claim, {}).items())


def _models(counts: Mapping[str, int | None]) -> str:
    studied = [name for name, count in counts.items() if rule.studied(count)]
    models = ", ".join(f"{name} ({rule.millions(count)})" for name, count in counts.items())
    return f"{models or 'no model'}; of the mT5 models from 580M to 13B: {', '.join(studied) or 'none'}"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(set(values)))) or "none"


def _micro(spec: RunSpec) -> int:
    return spec.batch.micro


def _global(spec: RunSpec) -> int:
    return spec.global_batch


def _rate(spec: RunSpec) -> float:
    return spec.optimizer.lr


def _precision(spec: RunSpec) -> str:
    return spec.precision


def _data(spec: RunSpec) -> str:
    return spec.data.name


def _workers(spec: RunSpec) -> int:
    return spec.data.workers


_SETTINGS: Mapping[str, Mapping[str, Callable[[RunSpec], Any]]] = {
    "C5": {"micro-batch": _micro, "samples per step": _global, "learning rate": _rate, "precision": _precision},
    "C6": {"data": _data, "loader workers": _workers},
}
