"""The Python package of zeroscale: functions to plan, run, predict and advise, and to open measured results.

```python
import zeroscale

plan = zeroscale.plan("smoke", {"engine": ["ddp", "zero2"]})
zeroscale.run(plan, results="results/runs")
study = zeroscale.open_study("results/runs/smoke")
study.best
```

The functions and classes are defined in `bench.api` and `analysis`. Importing them imports neither torch nor pandas.
"""

from analysis import MeasuredStudy, describe_columns, load, open_study
from bench.api import (
    Progress,
    Status,
    Study,
    UserError,
    advise,
    cancel,
    compare_places,
    measure,
    plan,
    plan_search,
    point,
    predict,
    prepare,
    rehearsal,
    rehearse,
    resume,
    run,
    search,
    search_verdict,
    status,
    submit,
    unreadable,
)

__all__ = [
    "MeasuredStudy", "Progress", "Status", "Study", "UserError", "advise", "cancel", "compare_places",
    "describe_columns", "load", "measure", "open_study", "plan", "plan_search", "point", "predict", "prepare",
    "rehearsal", "rehearse", "resume", "run", "search", "search_verdict", "status", "submit", "unreadable",
]  # fmt: skip
