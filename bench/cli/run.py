"""Measure one point here and now, with real processes.

  zeroscale run
  zeroscale run model=mt5_small engine=zero3 batch.micro=2

It uses the GPUs that are here or, without any, two processes of the CPU; devices_per_node says another number. On a CPU
precision, sequence lengths and window are those of the smoke study, so that there is an answer within a minute: give a
key of precision, sequence or measure, and its section is that of conf/config.yaml.
"""

import argparse

from pydantic import ValidationError

from bench import config, launchers
from bench.cli import answer, asking, live, point, present
from bench.config import Pair, Request
from bench.errors import UserError
from bench.record import Circumstance, Limits
from bench.spec import config_id
from bench.study import Study
from bench.sweep.asked import Todo


def arguments(parser: argparse.ArgumentParser) -> None:
    asking.arguments(parser)
    parser.add_argument("--study", default="adhoc", metavar="NAME", help="folder of the results; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run ended `ok`."""
    asked, chosen = _asked(args)
    if args.dry_run:
        print(asking.as_json(asked) if args.json else asking.line(asked))
        return 0
    if not args.json:
        present.say(chosen)
        print(asking.line(asked), flush=True)
    overrides = (*(f"{key}={value}" for key, value in chosen), *args.overrides)
    todo = _todo(asked, _study(args.study), overrides)
    with live.line(quiet=args.json) as follow:
        folder, record = point.measure(todo, args.results / args.study, follow, new_repeat=True)
    if args.json:
        print(record.model_dump_json(indent=1, by_alias=True))
    else:
        print("\n".join([asking.result(record), *answer.lines(record, folder, args.overrides)]))
    return 0 if record.outcome.kind == "ok" else 1


def _asked(args: argparse.Namespace) -> tuple[Request, list[Pair]]:
    """Return the point, and what was chosen for it on a CPU; UserError for one that cannot run here."""
    given = config.single(args.overrides)
    asked = config.request(given, args.config_dir)
    if launchers.load(asked.launcher).QUEUES:
        raise UserError(f"launcher={asked.launcher}", "run measures here and now", "use `zeroscale sweep`")
    chosen = present.small([key for key, _ in given], asked)
    asked = config.request([*chosen, *given], args.config_dir)
    config.check(asked, asking.device(asked))
    present.check(asked)
    return asked, chosen


def _study(name: str) -> Study:
    try:
        return Study(name=name)
    except ValidationError as error:
        rule = "a name is made of letters, digits, '.', '_' and '-', and begins with a letter or digit"
        raise UserError(f"--study {name}", rule, "choose another") from error


def _todo(asked: Request, study: Study, overrides: tuple[str, ...]) -> Todo:
    """Return one attempt at a point; its repeat is found when it starts."""
    options = asked.launcher_options.model_dump(mode="json")
    circumstance = Circumstance(
        study=study.name,
        repeat=0,
        attempt=0,
        machine=asked.machine.on(asking.device(asked)),  # the ranks obey, or refuse
        launcher={"name": asked.launcher, **options},
        limits=Limits(**{key: options[key] for key in Limits.model_fields if key in options}),
        overrides=overrides,
    )
    return Todo(spec=asked.spec, circumstance=circumstance, config_id=config_id(asked.spec))
