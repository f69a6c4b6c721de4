"""Records for a team's usual page: one run per record, for TensorBoard or for MLflow; a search's trials for Optuna's.

run           a record as those pages know a run: parameters, metrics, series by step, tags
tensorboard   event files, one folder per run
mlflow        MLflow's file store, one experiment per study
optuna        Optuna's journal, one study per search
"""

import importlib
from types import ModuleType

from bench.errors import UserError


def import_library(module: str, package: str, extra: str) -> ModuleType:
    """Import the library that a page needs; UserError where its extra is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"--to {extra}", f"{package} is not installed", f"pip install 'zeroscale[{extra}]'") from error
