"""zeroscale's analysis: tables, figures and answers from records. It imports neither torch nor Hydra.

```python
import analysis

study = analysis.open_study("results/runs/paper")
study.plot.step_time()
```

`study.answer()` is the answer in sentences. `study.table`, `study.summary`, `study.best` and `study.scaling` are
DataFrames; their `attrs` hold the units and meanings of their columns. `study.full` has all columns, and
`study.trusted` only runs that nothing disturbed.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.measured_study import MeasuredStudy, open_study

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["MeasuredStudy", "describe_columns", "load", "open_study"]


def __dir__() -> list[str]:
    return list(__all__)


def load(paths: "str | Path | Iterable[str | Path]") -> "DataFrame":
    """Return the run table of every record at or below `paths`, one row per run; its `attrs` have units and meanings.

    Other files are skipped, with a warning. Raises UserError for a path that does not exist.
    """
    return open_study(paths).table


def describe_columns(frame: "DataFrame | None" = None) -> "DataFrame":
    """Return unit and meaning of each column of a table, or of every run table, by its name.

    It needs no `attrs`, so it also works for a table that has lost them in an operation.
    """
    from analysis.columns import tabulate_columns  # here, so that `import analysis` stays light

    return tabulate_columns(frame)
