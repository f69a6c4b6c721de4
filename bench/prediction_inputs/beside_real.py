"""Rehearse recorded runs of several ranks again, one real rank at a time, and write down the memory of both.

  python -m bench.prediction_inputs.beside_real [FOLDER]  # ten minutes; writes rehearsed_beside_real.csv

The runs are those of inputs/peaks.csv and of the study peaks. At stages 0 to 2 every rank is rehearsed, at stage 3 the
first.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.config import compose
from bench.prediction_inputs.memory_runs import RecordedRuns
from bench.prediction_inputs.rehearsals import SEEN, SHORT, format_header, list_seen, parse_folder, rehearse, write
from bench.spec import RunSpec, canonical, config_id

Seen = tuple[int, ...]
COLUMNS = ("spec", "parameters", "repeat", *(f"{kind}_{name}" for kind in ("rehearsed", "real") for name in SEEN))
WHAT = "Recorded runs of several ranks, and the same rehearsed: of both the rank that has most."


def list_compared(recorded: RecordedRuns, results: Path) -> Iterator[tuple[object, ...]]:
    """Yield what each run took, rehearsed and real; what was run again is rehearsed once."""
    rehearsed: dict[str, Seen] = {}
    for run in recorded.of_several_ranks():
        known = config_id(run.spec)
        if known not in rehearsed:
            rehearsed[known] = find_largest(run.spec, results)
        taken = run.resident, run.init_peak, run.peak
        yield canonical(run.spec), run.parameters, run.repeat, *rehearsed[known], *taken


def find_largest(spec: RunSpec, results: Path) -> Seen:
    """Return the bytes of the rehearsed rank that has most, in the order of SEEN."""
    short = compose.compose_request(compose.parse_single(SHORT)).spec.measure  # memory is the same in every step
    quick = spec.model_copy(update={"measure": short})
    ranks = [0] if spec.engine.options.get("stage") == 3 else range(spec.world_size)
    seen = [list_seen(rehearse(quick, rank, results)) for rank in ranks]
    return tuple(max(bytes_ for bytes_ in column if bytes_ is not None) for column in zip(*seen, strict=True))


def main() -> None:
    from bench.runtime import fork_server

    recorded = parse_folder(__doc__)
    table = recorded.inputs / "rehearsed_beside_real.csv"
    fork_server.preload("cpu")
    with tempfile.TemporaryDirectory() as folder:
        write(
            table,
            format_header(WHAT, "bench.prediction_inputs.beside_real"),
            COLUMNS,
            list_compared(recorded, Path(folder)),
        )


if __name__ == "__main__":
    main()
