"""Recorded numbers with their whole specs: the ledger of predictions composes no configuration by itself.

python -m tests.bench.predict.ledger_inputs
"""

import csv
import io
from pathlib import Path

from bench import config, models
from bench.spec import RunSpec, canonical
from bench.store import write_atomically
from tests.bench.predict.rehearsals import case_of, spec_of

HERE = Path(__file__).parent
INPUTS = HERE.parents[2] / "results" / "predictions" / "inputs"
TABLES = ("peaks", "rehearsed")


def converted(name: str) -> str:
    """Return a table of this folder again, its rows with whole specs and the parameters of their models."""
    lines = (HERE / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    rows = [_row(row) for row in csv.DictReader(lines[len(comments) :])]
    text = io.StringIO()
    text.writelines(
        f"{line}\n" for line in [*comments, f"# With whole specs by ledger_inputs.py, from {name}.csv there."]
    )
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(row: dict[str, str]) -> dict[str, object]:
    spec = _spec(tuple(row["overrides"].split())) if "overrides" in row else spec_of(case_of(row))
    bytes_ = {name.replace("peak_allocated", "peak"): cell for name, cell in row.items() if name.endswith("_bytes")}
    told = {"spec": canonical(spec), "parameters": models.expected_parameters(spec.model)}
    return told | ({"rank": row["rank"]} if "rank" in row else {}) | bytes_


def _spec(overrides: tuple[str, ...]) -> RunSpec:
    return config.request(
        config.single(["devices_per_node=2", *overrides, "launcher=slurm"])
    ).spec  # starts nothing: any number of nodes


def main() -> None:
    INPUTS.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        write_atomically(INPUTS / f"{name}.csv", converted(name).encode())


if __name__ == "__main__":
    main()
