"""Small synthetic records of runs, with round numbers. The results that tests expect from them can be computed by
hand."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.results import Results, judge_records
from bench.core import store
from bench.core.machine import Machine
from bench.core.record import (
    Circumstance,
    Environment,
    EnvironmentClass,
    Evaluation,
    Evidence,
    Observations,
    Outcome,
    OutcomeKind,
    RankMemory,
    RunRecord,
    Steps,
    Tokens,
)
from bench.core.spec import RunSpec, config_id

SHAPE = {
    "d_model": 4, "d_kv": 2, "d_ff": 6, "encoder_layers": 1, "decoder_layers": 1, "heads": 2, "vocab": 10,
    "gated": True, "activation": "gelu_new", "separate_head": True,
}  # fmt: skip
LOSSES = (9.0, 8.0, 7.0, 6.0, 5.0)
MIB = 2**20


_BACKENDS = {"ddp": "ddp"}


def spec(engine: str | dict[str, Any] = "zero1", micro: int = 2, ranks: int = 2, **more: Any) -> RunSpec:
    """Return the spec of a tiny model with 8 encoder and 2 decoder tokens per sample. `ranks` is the number of devices
    per node, and `more` sets further fields of the spec."""
    model = {"name": "tiny", "shape": SHAPE, "parameters": 400, **more.pop("model", {})}
    plain = {
        "model": model,
        "engine": engine
        if isinstance(engine, dict)
        else {"name": engine, "backend": _BACKENDS.get(engine, "deepspeed")},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": micro},
        "devices_per_node": ranks,
        "sequence": {"encoder": 8, "decoder": 2},
        "precision": "fp32",
        **more,
    }
    return RunSpec.model_validate(plain)


def steps(window: Sequence[float] = (0.1,) * 30, *, cut: int = 5, **more: Any) -> Steps:
    """Return recorded steps: `cut` slow warm-up steps, then the timed steps with the durations `window`. `more` sets
    further fields, such as `loss`."""
    series = (9.9,) * cut + tuple(window)
    plain: dict[str, Any] = {
        "cut": cut,
        "stopped": "window",
        "step_s": series,
        "data_wait_s": (0.5,) * cut + (0.001,) * len(window),
        "loss": (*LOSSES, *(4.0,) * len(series))[: len(series)],
        "gradient_norm": (2.0,) * len(series),
        "window_s": sum(window),
        **more,
    }
    return Steps.model_validate(plain)


def scattered(low: float, middle: float, high: float) -> tuple[float, ...]:
    """Return thirty step times in random order, ten with each of the three values. The 95 % interval of the median of
    these step times is `low` to `high`."""
    window = [low, middle, high] * 10
    random.Random(0).shuffle(window)
    return tuple(window)


def memory(ranks: int, peak: int = 10 * MIB, **more: Any) -> tuple[RankMemory, ...]:
    """Return the memory of all ranks. The peak of rank 0 is `peak` bytes, and rank r has r MiB more."""
    alike = {"init_peak_bytes": peak // 2, "peak_rss_bytes": 7 * peak, **more}
    return tuple(RankMemory(rank=r, peak_allocated_bytes=peak + r * MIB, **alike) for r in range(ranks))


def observed(of: RunSpec, **more: Any) -> Observations:
    """Return the observations of a successful run of the spec `of`. `more` replaces single fields of these
    observations."""
    plain: dict[str, Any] = {
        "parameters": 402,
        "engine_config": {},
        "steps": steps(),
        "tokens": Tokens.counted(
            {kind: float(length * of.global_batch) for kind, length in of.sequence.items()},
            dict(zip(of.sequence, (3.0, 1.0), strict=False)),
        ),
        "memory": memory(of.world_size),
        "outside_collectives_s": tuple(0.01 * (r + 1) for r in range(of.world_size)),
        **more,
    }
    return Observations.model_validate(plain)


def environment(of: RunSpec, torch: str = "2.13.0", **more: Any) -> Environment:
    """Return a CPU environment for runs of the spec `of`. Only runs with the same environment class may be compared.
    Here, the class depends on the number of devices per node and on the version of torch."""
    known = EnvironmentClass(device="CPU", devices_per_node=of.devices_per_node, versions={"torch": torch})
    return Environment(environment_id=f"env{of.devices_per_node}-{torch}", classification=known, **more)


def run(of: RunSpec | None = None, *, torch: str | None = "2.13.0", **more: Any) -> RunRecord:
    """Return the record of a run with the spec `of` and the outcome `ok`. With `torch=None`, it has no environment.

    `more` sets further fields: the study, repeat number, attempt number, machine, launcher or start time of the run,
    fields of its observations, its `evidence`, and fields of its `environment` (as a dict).
    """
    of = of or spec()
    around = {"study": "smoke", "repeat": 0, "attempt": 0, "machine": {"name": "cpu"}, "launcher": {}}
    around["started_at"] = "2026-11-24T09:00:00+00:00"
    circumstance = Circumstance.model_validate(around | {k: more.pop(k) for k in tuple(around) if k in more})
    evidence: Evidence = more.pop("evidence", "measured")
    return RunRecord(
        config_id=config_id(of),
        evidence=evidence,
        spec=of,
        circumstance=circumstance,
        environment=environment(of, torch, **more.pop("environment", {})) if torch else None,
        outcome=Outcome(kind="ok"),
        observations=observed(of, **more),
    )


def trained(last: float, lr: float, seed: int = 0, *, asked: dict[str, Any] | None = None, **more: Any) -> RunRecord:
    """Return the record of a training of 5 steps, each with 40 tokens and 2 s. Its last evaluation has the loss `last`,
    and its learning rate is `lr`. `asked` sets further fields of its spec. `more` has further arguments for `run`."""
    of = spec(**{"learning": {"tokens": 200}, "optimizer": {"lr": lr}, "seed": seed, **(asked or {})})
    assert of.tokens_per_step == 40
    evaluations = [
        Evaluation(step=step, loss=loss, target_tokens=50, seconds=0.1, trained_s=2.0 * step)
        for step, loss in ((0, 6.0), (5, last))
    ]
    return run(of, evaluations=tuple(evaluations), **more)


def failed(kind: OutcomeKind, of: RunSpec | None = None, reason: str = "why", **more: Any) -> RunRecord:
    """Return the record of a failed run with this outcome kind. It has no observations."""
    evidence = more.pop("outcome_evidence", {"ranks": [{"rank": 0}]})
    outcome = Outcome(kind=kind, reason=reason, evidence=evidence)
    return run(of, **more).model_copy(update={"outcome": outcome, "observations": None})


def machine(**peaks: float) -> Machine:
    """Return a machine with known dense peak rates in TFLOPS by precision, for example `bf16=100`."""
    return Machine.model_validate({"name": "known", "peak_tflops": peaks})


def results(*records: RunRecord) -> Results:
    """Return `Results` of records, as if they had been read from a folder."""
    return judge_records({f"run{place}/record.json": record for place, record in enumerate(records)})


def run_table(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Return the run table of records, as if they had been read from a folder."""
    return results(*records).table


def save(folder: Path, *records: RunRecord) -> Path:
    """Write records into `folder` with the layout of a results folder, and return the folder."""
    for record in records:
        around = record.circumstance
        place = folder / around.study / record.config_id / f"{around.repeat}.{around.attempt}"
        place.mkdir(parents=True)
        store.write_json(place / store.RECORD, record)
    return folder


def plain(record: RunRecord) -> dict[str, Any]:
    """Return a record as the plain values of its JSON."""
    value: dict[str, Any] = json.loads(store.to_json(record))
    return value
