"""zeroscale's analysis: from records to tables, pictures and answers. Imports neither torch nor Hydra."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame


def load(paths: "str | Path | Iterable[str | Path]") -> "DataFrame":
    """Return the run table of every record at or below `paths`, one row per run; `analysis.columns` has the units.

    Files that are no records are named on standard error and left out. Raises UserError for a path that is not there.
    """
    from analysis import results  # here, so that `import analysis` stays light

    found = results.read([paths] if isinstance(paths, str | Path) else paths)
    results.warn(found)
    return found.table
