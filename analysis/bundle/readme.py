"""What stands at the top of a bundle: what is in it, and the commands."""

from collections.abc import Sequence

from analysis.formats import escape_markdown
from bench.record import RunRecord

_TEXT = """# {name}: records, and how to read and repeat them

{runs} runs of {configurations} configurations, measured with zeroscale {versions}.{told}

| path | holds |
|---|---|
| `runs/` | one folder per run: the whole record, every step of every rank, spec, environment, log |
| `tables/` | what the figures are drawn from: a row per run, per configuration, per point of a scaling curve |
| `points.csv` | one row per configuration, with the command that measures it again |
| `conf/` | models, engines and data as they were, for those commands |
| `environments/` | where it ran, and its packages as pip constraints |
| `numbers.tex` | the numbers as LaTeX macros, `\\zsStepSeconds{{KEY}}`; the keys stand in it |
| `manifest.csv` | size and SHA-256 of every file |

Reading needs zeroscale without any extra, no GPU and no training library. Here, in this folder:

```console
zeroscale table runs
zeroscale report runs --out report        # every figure and table
```

To measure a point again, install zeroscale with its extra `run` and take its command from `points.csv`, for example

```console
{command}
```

It says what is measured, to the last setting: the `config_id` is the same. Say where with `machine=NAME`; for several
nodes write `sweep` instead of `run` and add your own `launcher=NAME`. Data files of your own have to be where
`conf/data` says.
"""

_ANONYMOUS = """

Names of hosts, users, clusters, accounts, jobs, addresses and paths were replaced, each by the same pseudonym
throughout; only common words such as `main` or `gpu` stayed. Site options of the launcher, the git commit and runs
without a record were left out."""


def render_readme(name: str, records: Sequence[RunRecord], command: str, *, anonymous: bool) -> str:
    """Return the README of a bundle of `records`, one of whose points `command` measures again."""
    versions = {record.environment.versions.get("zeroscale") for record in records if record.environment}
    return _TEXT.format(
        name=escape_markdown(name),
        runs=len(records),
        configurations=len({record.config_id for record in records}),
        versions=escape_markdown(", ".join(sorted(filter(None, versions))) or "of an unknown version"),
        told=_ANONYMOUS if anonymous else "",
        command=command,
    )
