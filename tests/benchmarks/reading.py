"""Cost of reading records: seconds of a first read, a cached read, the summary, all tables and all figures.

  python -m tests.benchmarks.reading [--records 10000 100000]

The records are synthetic, in the form of a real record with 60 steps. The configurations are all combinations of 5
models, 5 engines, 6 micro-batches and 4 node counts. Each configuration is repeated as often as needed. Large
micro-batches are recorded as out of memory. The limit is lower for large models and for low ZeRO stages.

Before the first read, every `record.json` is in the page cache, and all libraries are imported. The last column is the
time per record for the last number of `--records`, divided by the time per record for the first number. The ratio is 1
if the total time is proportional to the number of records. It is less than 1 if a part of the time is fixed.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from analysis import figures, results
from analysis.report import render_tables
from analysis.report.findings import compute_findings
from analysis.report.page import Tips, render_figure
from bench.core.record import RunRecord
from bench.core.spec import RunSpec, config_id
from bench.core.store import find_records, read_record

MODELS = ("synthetic_a", "synthetic_b", "synthetic_c", "synthetic_d", "synthetic_e")
ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3")
MICROS = (1, 2, 4, 8, 16, 32)
NODES = (1, 2, 4, 8)
DEVICES = 8
STEPS, CUT = 60, 10
SERIES = ("step_s", "data_wait_s", "loss", "gradient_norm")
RECORDED = Path("tests/data/runs.zip/smoke")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[10_000, 100_000])
    sizes = parser.parse_args().records
    all_seconds = [measured(size) for size in sizes]
    print("\n" + " " * 28 + "".join(f"{size:>14,}" for size in sizes) + "   time per record, last ÷ first")
    for part in all_seconds[-1]:
        seconds = [of_size.get(part, math.nan) for of_size in all_seconds]
        growth = seconds[-1] / sizes[-1] / (seconds[0] / sizes[0])
        print(f"{part:28}" + "".join(f"{second:12.2f} s" for second in seconds) + f"{growth:32.2f}")


def measured(size: int) -> dict[str, float]:
    """Return the seconds of each reading operation on a folder of `size` synthetic records."""
    folder = Path(tempfile.mkdtemp(prefix="zeroscale-reading-"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    print(f"\n{size:,} records", flush=True)
    try:
        timed("(writing them)", {}, lambda: write(folder / "runs", size))
        time.sleep(3)  # a record that was written just now may be unfinished, so it would be read again
        return read(folder / "runs", size)
    finally:
        shutil.rmtree(folder)


def read(runs: Path, size: int) -> dict[str, float]:
    seconds_by_part: dict[str, float] = {}
    first = timed("first read", seconds_by_part, lambda: results.read([runs]))
    kept = timed("consolidated read", seconds_by_part, lambda: results.read([runs]))
    assert len(first.table) == size and kept.table.equals(first.table)
    answers: dict[str, float] = {}
    timed("summary", answers, lambda: kept.summary)
    found = timed("answers, scaling, drift", answers, lambda: compute_findings(kept))
    timed("tables: CSV, Markdown, LaTeX", answers, lambda: render_tables(found))
    timed("figures of the page", answers, lambda: draw_all(kept))
    return {**seconds_by_part, "all tables and figures": sum(answers.values()), **answers}


def draw_all(found: results.Results) -> None:
    for figure, picture in figures.build_pictures(found):
        render_figure(figure.name, figure.title, figure.alt, picture, Tips())


def timed(part: str, seconds_by_part: dict[str, float], work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    done = work()
    seconds_by_part[part] = time.perf_counter() - begin
    print(f"{part:28}{seconds_by_part[part]:10.2f} s", flush=True)
    return done


def write(runs: Path, size: int) -> None:
    """Write `size` records. Each record is the template of one configuration, into which a repeat number, an allocation
    and step times are inserted."""
    texts = [(record.config_id, text(record)) for record in configurations()]
    rng = random.Random(0)
    for place in range(size):
        repeat, which = divmod(place, len(texts))
        config, content = texts[which]
        folder = runs / "synthetic" / config / f"{repeat}.0"
        folder.mkdir(parents=True)
        middle = 0.1 * (1 + which % 20)
        steps = [middle * (1.5 if step < CUT else 1) * rng.gauss(1, 0.02) for step in range(STEPS)]
        values = {"repeat": repeat, "job": f"{repeat}", "step_s": steps, "window_s": sum(steps[CUT:])}
        for name, value in values.items():
            content = content.replace(f'"@{name}"', json.dumps(value))
        (folder / "record.json").write_text(content)


def text(record: RunRecord) -> str:
    """Return a record as a JSON template, with placeholders for the values that differ between repeats."""
    plain = json.loads(record.model_dump_json(by_alias=True))
    plain["circumstance"]["repeat"] = "@repeat"
    plain["environment"]["slurm"]["SLURM_JOB_ID"] = "@job"
    if plain["observations"]:
        plain["observations"]["steps"] |= {"step_s": "@step_s", "window_s": "@window_s"}
    return json.dumps(plain, indent=1)


def configurations() -> Iterator[RunRecord]:
    recorded = read_record(next(find_records([RECORDED]))).model_dump(mode="json", by_alias=True)
    for model, engine, micro, nodes in itertools.product(MODELS, ENGINES, MICROS, NODES):
        yield record(recorded, model, engine, micro, nodes)


def record(recorded: dict[str, Any], model: str, engine: str, micro: int, nodes: int) -> RunRecord:
    """Return a copy of a recorded run, changed to another model, engine, micro-batch and number of nodes. Its outcome
    is out of memory if model and micro-batch are large for the engine's ZeRO stage."""
    spec_fields = recorded["spec"] | {"nodes": nodes, "devices_per_node": DEVICES, "batch": {"micro": micro}}
    spec_fields["model"] = spec_fields["model"] | {"name": model, "parameters": None}
    backend = "ddp" if engine == "ddp" else "deepspeed"
    spec_fields["engine"] = {
        "name": engine,
        "backend": backend,
        "options": {} if engine == "ddp" else {"stage": int(engine[-1])},
    }
    spec = RunSpec.model_validate(spec_fields)
    observed = recorded["observations"] | {
        "steps": recorded["observations"]["steps"]
        | {"cut": CUT, "skipped": [], **dict.fromkeys(SERIES, [0.001] * STEPS)},
        "memory": [recorded["observations"]["memory"][0] | {"rank": rank} for rank in range(spec.world_size)],
        "outside_collectives_s": [0.1] * spec.world_size,
        "energy_j": [1000.0] * spec.world_size,
    }
    failed = MODELS.index(model) + MICROS.index(micro) - ENGINES.index(engine) > 6
    around = {"study": "synthetic", "machine": {"name": "synthetic", "peak_tflops": {"fp32": 1.0}}, "repeat": 0}
    plain = recorded | {
        "config_id": config_id(spec),
        "spec": spec.model_dump(by_alias=True),
        "circumstance": recorded["circumstance"] | around,
        "outcome": {"kind": "oom", "reason": "rank 0: out of memory"} if failed else recorded["outcome"],
        "observations": None if failed else observed,
    }
    return RunRecord.model_validate(plain)


if __name__ == "__main__":
    main()
