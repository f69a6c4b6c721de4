"""Measure one point here and now, with real processes.

  zeroscale run
  zeroscale run model=mt5_small engine=zero3 batch.micro=2

It uses the GPUs that are here or, without any, two processes of the CPU; devices_per_node says another number. On a CPU
precision, sequence lengths and window are those of the smoke study, so that there is an answer within a minute: give a
key of precision, sequence or measure, and its section is that of conf/config.yaml.
"""

import argparse

from bench import api, terminal
from bench.cli import answer_text, common_arguments, notes, options
from bench.formatting import describe_result

STUDY = "adhoc"


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_points(parser)
    parser.add_argument("--study", default=STUDY, metavar="NAME", help="folder of the results; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run ended `ok`."""
    made = api.point(args.overrides, study=args.study, config_dir=args.config_dir)
    if args.dry_run:
        print(common_arguments.format_json(made.composed) if args.json else common_arguments.format_line(made.composed))
        return 0
    if not args.json:
        notes.print_chosen(made.chosen)
        print(common_arguments.format_line(made.composed), flush=True)
    with terminal.progress(quiet=args.json) as follow:
        folder, record = api.measure(made, results=args.results, follow=follow)
    given = [*options.list_given_folders(args), *([] if args.study == STUDY else ["--study", args.study])]
    if args.json:
        print(record.model_dump_json(indent=1, by_alias=True))
    else:
        print("\n".join([describe_result(record), *answer_text.format_answer(record, folder, args.overrides, given)]))
    return 0 if record.outcome.kind == "ok" else 1
