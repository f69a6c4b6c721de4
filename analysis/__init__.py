"""zeroscale's analysis: from records to tables, pictures and answers. Imports neither torch nor Hydra.

```python
import analysis

study = analysis.open_study("results/runs/paper")
study.plot.step_time()
```

`study.table`, `study.summary`, `study.best` and `study.scaling` are DataFrames; their `attrs` hold the units and
meanings of their columns.
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

    Files that are no records are named on standard error and left out. Raises UserError for a path that is not there.
    """
    return open_study(paths).table


def describe_columns(frame: "DataFrame | None" = None) -> "DataFrame":
    """Return unit and meaning of each column of a table, or of every run table, by its name.

    This needs no `attrs`: it serves where an operation has lost them.
    """
    from analysis.columns import tabulate_columns  # here, so that `import analysis` stays light

    return tabulate_columns(frame)
