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
from bench.core.errors import UserError

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
    """Return 0 when every record that could be read, or the trials of every folder, are there."""
    from analysis import export

    exported = [] if args.to == "optuna" else export.list_exported_runs(records.read(args.paths))
    try:
        if args.to == "optuna":
            told = f"{export.write_journal(args.paths, args.out)} trials written"
        else:
            write = export.write_mlflow if args.to == "mlflow" else export.write_tensorboard
            written = write(exported, args.out)
            told = f"{written} runs written, {len(exported) - written} unchanged"
    except OSError as error:
        raise UserError(str(args.out), f"cannot be written ({error.strerror})", "choose another --out") from error
    print(f"{told}; {_SHOWN_BY[args.to].format(out=args.out)}")
    return 0
