"""Reference pages of the analysis: columns, metrics, figures, outcomes and quality flags of runs, and the Python
interface."""

import importlib
import importlib.util
import inspect
import re
from typing import get_args

from analysis.columns import LATER, LEARNED, list_all_columns
from analysis.figures import list_figures
from analysis.flags import FLAGS, NO_MEASUREMENT, NOTES, OUTCOMES
from analysis.metrics import load_metrics
from bench.core.record import FINAL, OutcomeKind
from docs.generate.markdown import code, plain, prose, table

FACES = ("zeroscale", "analysis", "bench.api")
"""Modules of the Python interface for scripts and notebooks. The first re-exports names of the other two."""


def columns_page() -> str:
    """Return the page of the run table's columns and the report's figures."""
    derived = load_metrics()
    facts = [c for name, c in list_all_columns().items() if name not in derived]
    quantities = [c for name, c in list_all_columns().items() if name in derived]
    return "\n\n".join(
        [
            "# Columns, quantities and figures\n\n"
            "The run table has one row per run: `zeroscale table`, a report's tables, and `analysis.load`. Unknown "
            "is empty, never 0.",
            "## Facts\n\nRead from the record. A table has the following columns only if a run has a value for "
            f"them, other than the default: {', '.join(map(code, (*LATER, *LEARNED)))}.",
            table(("column", "meaning", "unit"), [(code(c.name), plain(c.meaning), plain(c.unit)) for c in facts]),
            "## Quantities\n\nDerived in `analysis/metrics`.",
            table(
                ("column", "meaning", "unit", "better is"),
                [
                    (code(c.name), plain(c.meaning), plain(c.unit), "" if c.better == "neither" else c.better)
                    for c in quantities
                ],
            ),
            "## Figures\n\nIn every report with data for them.",
            table(("figure", "title"), [(code(one.name), plain(one.title)) for one in list_figures()]),
        ]
    )


def outcomes_page() -> str:
    """Return the page of the outcomes, quality flags and notes that a run may have."""
    kinds = get_args(OutcomeKind)
    if set(kinds) != set(OUTCOMES):
        raise SystemExit(f"outcomes without a meaning, or no outcomes: {sorted(set(kinds) ^ set(OUTCOMES))}")
    rows = [(code(kind), OUTCOMES[kind], "no" if kind in FINAL else "yes") for kind in kinds]
    flags = [(code(name), plain(flag.meaning)) for name, flag in FLAGS.items()]
    notes = [(code(name), plain(note.meaning)) for name, note in NOTES.items()]
    never = " and ".join(code(name) for name in NO_MEASUREMENT)
    return "\n\n".join(
        [
            "# Outcomes and flags",
            "## Outcomes\n\nHow a run ended; a failure is a row of the table like any other. An outcome that another "
            "attempt would not change is final. Every other outcome is retried within the study's budget.",
            table(("outcome", "means", "retried"), rows),
            f"## Flags\n\nDoubts about a run's numbers, in the column `flags`. Runs with {never} are in no summary.",
            table(("flag", "the run"), flags),
            "## Notes\n\nWidth and reliability of the interval of a run's step time, in the column `notes`. They do "
            "not concern the number itself.",
            table(("note", "the run"), notes),
        ]
    )


def python_page() -> str:
    """Return the page of the Python interface: the public functions and classes of `zeroscale` for scripts and
    notebooks."""
    parts = ["# From Python"]
    for name in FACES:
        if importlib.util.find_spec(name) is None:
            continue
        module = importlib.import_module(name)
        parts += [f"## `{name}`", prose(inspect.getdoc(module) or "")]
        parts += [_function(name, one) if inspect.isfunction(one) else _class(name, one) for one in _faces(module)]
    return "\n\n".join(parts)


def _faces(module: object) -> list[object]:
    """Return the public functions and classes of a module, if the module or one of its submodules defines them."""
    named = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = [getattr(module, name) for name in named]
    kinds = [one for one in found if inspect.isfunction(one) or inspect.isclass(one)]
    return [one for one in kinds if f"{one.__module__}.".startswith(f"{module.__name__}.")]  # type: ignore[attr-defined]


def _class(module: str, described: object) -> str:
    name = described.__name__  # type: ignore[attr-defined]
    public = {key: inspect.getdoc(one) or "" for key, one in vars(described).items() if not key.startswith("_")}
    members = [(code(key), plain(" ".join(text.split()))) for key, text in public.items()]
    return f"### {name}\n\n{prose(inspect.getdoc(described) or '')}\n\n" + table(("member", "is"), members)


def _function(module: str, function: object) -> str:
    name = function.__name__  # type: ignore[attr-defined]
    signature = str(inspect.signature(function)).replace("'", "")  # type: ignore[arg-type]
    signature = re.sub(r"<function (\w+) at 0x\w+>", r"\1", signature)  # the address differs between runs
    signature = (
        re.sub(r"PosixPath\(([^)]*)\)", r"\1", signature).replace("pathlib.", "").replace("collections.abc.", "")
    )
    return f"### {name}\n\n```python\n{module}.{name}{signature}\n```\n\n{prose(inspect.getdoc(function) or '')}"
