"""Rehearse recorded runs of several ranks again, one real rank at a time, and write down the memory of both.

  python -m tests.bench.predict.beside_real  # ten minutes; writes rehearsed_beside_real.csv of results/predictions

The runs are those of peaks.csv and of tests/data/runs/peaks. At stages 0 to 2 every rank is rehearsed, at stage 3 the
first.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from analysis.predictions.recorded import MemoryRun, memory_runs, tabled
from bench import config
from bench.spec import RunSpec, canonical, config_id
from tests.bench.predict.ledger_inputs import INPUTS
from tests.bench.predict.rehearsals import SEEN, SHORT, header, rehearse, seen_of, write

Seen = tuple[int, ...]
TABLE = INPUTS / "rehearsed_beside_real.csv"
COLUMNS = ("spec", "parameters", "repeat", *(f"{kind}_{name}" for kind in ("rehearsed", "real") for name in SEEN))
WHAT = "Recorded runs of several ranks, and the same rehearsed: of both the rank that has most."


def compared(results: Path) -> Iterator[tuple[object, ...]]:
    """Yield what each run took, rehearsed and real; what was run again is rehearsed once."""
    rehearsed: dict[str, Seen] = {}
    for run in real():
        known = config_id(run.spec)
        if known not in rehearsed:
            rehearsed[known] = most(run.spec, results)
        taken = run.resident, run.init_peak, run.peak
        yield canonical(run.spec), run.parameters, run.repeat, *rehearsed[known], *taken


def real() -> Iterator[MemoryRun]:
    """Yield the recorded runs of several ranks."""
    yield from (run for run in (*tabled("peaks"), *memory_runs("peaks")) if run.spec.world_size > 1)


def most(spec: RunSpec, results: Path) -> Seen:
    """Return the bytes of the rehearsed rank that has most, in the order of SEEN."""
    short = config.request(config.single(SHORT)).spec.measure  # memory is the same in every step
    quick = spec.model_copy(update={"measure": short})
    ranks = [0] if spec.engine.options.get("stage") == 3 else range(spec.world_size)
    seen = [seen_of(rehearse(quick, rank, results)) for rank in ranks]
    return tuple(max(bytes_ for bytes_ in column if bytes_ is not None) for column in zip(*seen, strict=True))


def main() -> None:
    from bench import fork_server

    fork_server.preload("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write(TABLE, header(WHAT, "tests.bench.predict.beside_real"), COLUMNS, compared(Path(folder)))


if __name__ == "__main__":
    main()
