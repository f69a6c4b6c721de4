"""zeroscale's analysis: tables, figures and answers from records. It imports neither torch nor Hydra.

```python
import analysis

study = analysis.open_study("results/runs/paper")
study.plot.step_time()
```

`study.answer()` returns the results in sentences. `study.table`, `study.summary`, `study.best` and `study.scaling` are
DataFrames; their `attrs` hold the units and meanings of their columns. `study.full` is the study with all columns, and
`study.trusted` is the study without runs that something disturbed, such as background load.
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
    """Return the run table of all records (files `record.json`) at or below `paths`: a DataFrame with one row per run.

    The `attrs` of the DataFrame hold the units and meanings of the columns. Files that are no records are skipped, with
    a warning. Raise UserError for a path that does not exist.
    """
    return open_study(paths).table


def describe_columns(frame: "DataFrame | None" = None) -> "DataFrame":
    """Return the unit and meaning of each column of `frame`, or of all columns of the run table if `frame` is None.

    Columns are recognised by name. So the function also works for a table whose `attrs` a pandas operation has dropped.
    """
    from analysis.columns import tabulate_columns  # imported here, so that `import analysis` stays fast
    from bench.core.errors import UserError

    if frame is not None and not hasattr(frame, "columns"):
        raise UserError(repr(frame), "is not a DataFrame", "give a table, e.g. describe_columns(study.table)")
    return tabulate_columns(frame)
