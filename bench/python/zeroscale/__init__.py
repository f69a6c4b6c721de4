"""zeroscale from Python: plan, run, predict and advise; then open what was measured.

```python
import zeroscale

plan = zeroscale.plan("smoke", {"engine": ["ddp", "zero2"]})
zeroscale.run(plan, results="results/runs")
study = zeroscale.open_study("results/runs/smoke")
study.best
```

The same functions and classes are in `bench.api` and `analysis`. The import needs neither torch nor pandas.
"""

from analysis import MeasuredStudy, describe_columns, load, open_study
from bench.api import (
    Progress,
    Status,
    Study,
    UserError,
    advise,
    cancel,
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
    "MeasuredStudy", "Progress", "Status", "Study", "UserError", "advise", "cancel", "describe_columns", "load",
    "measure", "open_study", "plan", "plan_search", "point", "predict", "prepare", "rehearsal", "rehearse", "resume",
    "run", "search", "search_verdict", "status", "submit", "unreadable",
]  # fmt: skip
