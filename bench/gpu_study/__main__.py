"""The study on one GPU, from nothing to one packed file: `make gpu-study`.

  make gpu-study                                               every part
  make gpu-study GPU_STUDY="check sweep --minutes 9"           these, ended in good order; call again to go on
  python -m bench.gpu_study --trial                 every part on a CPU, with a tiny model
  python -m bench.gpu_study report --from packed.tar.gz

It needs no network. The state is the results folder: what has its answer there is not measured again. `--pack FILE`
writes that folder and the reports as one archive at the end, and `--from FILE` begins with such an archive, so that the
study can go on, or be read, on another machine.
"""

import argparse
import math
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from bench.gpu_study import parts
from bench.gpu_study.session import StudySession


def main() -> int:
    """Return 0 if everything that was asked for is answered."""
    args = _build_parser().parse_args()
    root = Path("results/runs")
    name = "gpu_trial" if args.trial else "gpu"
    session = StudySession(
        results=args.results or root / name,
        reports=args.reports or root.parent / "reports" / name,
        machine="cpu" if args.trial else args.machine,
        trial=args.trial,
        until=time.monotonic() + 60 * args.minutes,
    )
    if args.begin_with and not args.begin_with.is_file():
        raise SystemExit(f"--from {args.begin_with}: no such file; give what --pack wrote")
    if args.begin_with:
        _unpack(args.begin_with, session)
    answered = {}
    try:
        for part in args.parts or parts.PARTS:
            answered[part] = parts.PARTS[part](session)
    finally:  # also what was measured until Ctrl-C
        if args.pack:
            _pack(args.pack, session)
    for part, done in answered.items():
        print(f"{part:<12}{'answered' if done else 'not finished: call it again, or see what failed above'}")
    return 0 if all(answered.values()) else 1


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu_study",
        description=f"{__doc__}\nparts:\n{parts.format_parts()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", type=_parse_part, help="default: all of them, in this order"
    )
    parser.add_argument("--machine", default="auto", help="a file of conf/machine, for its peak (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end in good order after so many")
    parser.add_argument("--trial", action="store_true", help="a tiny model on the CPU in place of every model")
    parser.add_argument("--results", type=Path, help="default: results/runs/gpu")
    parser.add_argument("--reports", type=Path, help="default: results/reports/gpu")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write results and reports as one .tar.gz")
    parser.add_argument("--from", dest="begin_with", type=Path, metavar="FILE", help="begin with what was packed")
    return parser


def _parse_part(name: str) -> str:
    if name not in parts.PARTS:
        raise argparse.ArgumentTypeError(f"{name}: no such part; choose from {', '.join(parts.PARTS)}")
    return name


def _pack(file: Path, session: StudySession) -> None:
    """Write results and reports into `file`, whole or not at all."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    with tarfile.open(partial, "w:gz") as archive:
        for name, folder in (("runs", session.results), ("reports", session.reports)):
            if folder.is_dir():
                archive.add(folder, name)
    partial.replace(file)
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def _unpack(file: Path, session: StudySession) -> None:
    """Put packed results and reports back where they are looked for; what is already there stays."""
    with tempfile.TemporaryDirectory() as aside:
        with tarfile.open(file) as archive:
            archive.extractall(aside, filter="data")
        for name, folder in (("runs", session.results), ("reports", session.reports)):
            for path in sorted(Path(aside, name).rglob("*")):
                target = folder / path.relative_to(Path(aside, name))
                if path.is_file() and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
