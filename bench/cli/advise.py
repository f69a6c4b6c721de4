"""Say which stage, micro-batch, accumulation, checkpointing and node count to take, why, and how sure that is.

  zeroscale advise model=mt5_xl machine=h200 devices_per_node=8
  zeroscale advise model=mt5_xxl machine=a100_80 devices_per_node=8 nodes=1,2,4,8 tokens=1e12 deadline=40d price=2
  zeroscale advise model=gpt2_xl machine=h100 devices_per_node=8 loss=2.6 best=shortest storage=2e9
  zeroscale advise model=mt5_xl machine=h100 devices_per_node=8 nodes=4 max_global_batch=2048 --export handover
  zeroscale advise model=mt5_xl machine=h200 devices_per_node=8 tokens=1e12 price=2 --page advice.html

Not given, these are searched, and a comma list narrows them: engine, nodes, batch.micro, batch.accumulation (with
max_global_batch), activation_checkpointing, and for pipelines parallel.tensor, parallel.pipeline and
parallel.stages_per_rank. batch.global is kept exactly. Besides, in plain words:

{words}

With a deadline the best is what needs the fewest node-hours in time; with node_hours, a budget or best=shortest the
fastest; else what makes most tokens per second and device. With storage hours and costs count failures. Of what cannot
be told apart the surer one is advised: the lower stage, or what was measured; of what is as good within 5 % the fewest
nodes, then the largest micro-batch. Runs in --results on the same machine outrank formulas.
"""

import argparse
import shlex
from pathlib import Path

from bench import api, training_export
from bench.advising import questions, search
from bench.advising.search import Answer
from bench.cli import advice_text, options, pages
from bench.cli.advice_json import format_json
from bench.files import RESULTS
from bench.sweep.planning import target

__doc__ = __doc__.format(words=questions.format_help())


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_overrides(parser, "override of conf/config.yaml, or a plain word", least="+")
    options.add_json(parser)
    options.add_config_dir(parser)
    pages.add_page(parser)
    parser.add_argument("--results", type=Path, metavar="DIR", help=f"measured runs, default: {RESULTS}")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="hand the winner over: a new folder that starts alone"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if there is an answer."""
    if args.page:
        pages.check_path(args.page)
    if args.export:
        training_export.check_free(args.export)
    answer = api.advise(
        args.overrides, results=args.results, config_dir=args.config_dir, standalone=args.export is not None
    )
    if args.export:
        _export_winner(answer, args.export)
    print(format_json(answer) if args.json else advice_text.format_text(answer))
    if args.export and not args.json:
        print(f"\nhanded over in {args.export}; its README.md says how to start")
    if args.page:
        from analysis.answer_page import render_advice_page

        page = render_advice_page(answer, advice_text.build_text(answer), _format_command(args))
        pages.write(args.page, page, quiet=args.json)
    return 0


def _format_command(args: argparse.Namespace) -> str:
    """Return the command that gives this answer."""
    paths = {"--results": args.results, "--config-dir": args.config_dir}
    given = [word for option, path in paths.items() if path for word in (option, str(path))]
    return shlex.join(["zeroscale", "advise", *args.overrides, *given])


def _export_winner(answer: Answer, folder: Path) -> None:
    """Write the winner down in a new folder, as something that starts alone."""
    advice, composed = answer.advice, answer.request
    steps = advice.question.steps(advice.winner)
    how = search.load_standalone(composed), composed.launcher_options, target.find_predicted_device(composed)
    training_export.write_files(
        folder,
        training_export.build_files(
            training_export.TrainingExport(advice.winner.spec, *how, steps, advice_text.format_text(answer))
        ),
    )
