"""Write one run per record for a page that a team has anyway: TensorBoard, or MLflow's file store; or a search's trials
for optuna-dashboard.

  zeroscale export results/runs/smoke --to tensorboard --out results/exports/tensorboard
  zeroscale export results/runs/smoke --to mlflow --out mlruns
  zeroscale export results/runs/search_smoke --to optuna --out search_smoke.log

Parameters, metrics, every step's series and tags such as the outcome. What was exported before is renewed, never
doubled. Needs the extra of that name: pip install 'zeroscale[mlflow]'; `optuna` needs `search`.
"""

import argparse
from pathlib import Path

from analysis.cli import records
from bench.errors import UserError

_SHOWN_BY = {
    "tensorboard": "tensorboard --logdir {out}",
    "mlflow": "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {out}",
    "optuna": "optuna-dashboard {out}",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    records.arguments(parser)
    parser.add_argument("--to", choices=tuple(_SHOWN_BY), required=True)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the page's files; for optuna a file"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 when every record that could be read is there."""
    if args.to == "optuna":
        return _write_journal(args)
    import importlib

    from analysis.export.run import list_exported_runs

    found = records.read(args.paths)
    exported = list_exported_runs(found)
    try:
        written = importlib.import_module(f"analysis.export.{args.to}").write(exported, args.out)
    except OSError as error:
        raise UserError(str(args.out), f"cannot be written ({error.strerror})", "choose another --out") from error
    print(f"{written} runs written, {len(exported) - written} unchanged; {_SHOWN_BY[args.to].format(out=args.out)}")
    return 0


def _write_journal(args: argparse.Namespace) -> int:
    """Return 0 when the trials of every folder are there."""
    from analysis.export.optuna import write_journal

    try:
        written = write_journal(args.paths, args.out)
    except OSError as error:
        raise UserError(str(args.out), f"cannot be written ({error.strerror})", "choose another --out") from error
    print(f"{written} trials written; {_SHOWN_BY[args.to].format(out=args.out)}")
    return 0
