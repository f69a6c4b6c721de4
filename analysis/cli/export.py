"""Write records in the format of another dashboard: TensorBoard, MLflow's file store, or optuna-dashboard.

  zeroscale export results/runs/smoke --to tensorboard --out results/exports/tensorboard
  zeroscale export results/runs/smoke --to mlflow --out mlruns
  zeroscale export results/runs/search_smoke --to optuna --out search_smoke.log

For TensorBoard and MLflow, each record becomes one run. An exported run has parameters, metrics,
series with a value per step, and tags such as the outcome.

For optuna-dashboard, the trials of a search are written. The trials are defined in the folder of the
search and not in its records. So an archive of the search must contain the whole folder, as
`zeroscale pack --whole` writes it.

A second export replaces the first. Each format needs the extra of its name, for example
pip install 'zeroscale[mlflow]'; `optuna` needs the extra `search`.
"""

import argparse
from pathlib import Path

from analysis.cli import add_paths, read_records, reporting_unwritable

_SHOWN_BY = {
    "tensorboard": "tensorboard --logdir {out}",
    "mlflow": "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {out}",
    "optuna": "optuna-dashboard {out}",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_paths(parser)
    parser.add_argument("--to", choices=tuple(_SHOWN_BY), required=True, help="dashboard that reads the files")
    out = "folder for the dashboard's files; with --to optuna a file"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=out)


def run(args: argparse.Namespace) -> int:
    """Return exit code 0 once all records, or the trials of all search folders, are written."""
    from analysis import export

    exported = [] if args.to == "optuna" else export.list_exported_runs(read_records(args.paths))
    with reporting_unwritable(args.out):
        if args.to == "optuna":
            outcome = f"{export.write_journal(args.paths, args.out)} trials written"
        else:
            write = export.write_mlflow if args.to == "mlflow" else export.write_tensorboard
            written = write(exported, args.out)
            outcome = f"{written} runs written, {len(exported) - written} unchanged"
    print(f"{outcome}; {_SHOWN_BY[args.to].format(out=args.out)}")
    return 0
