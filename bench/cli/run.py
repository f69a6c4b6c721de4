"""Measure one point here and now, with real processes.

zeroscale run model=tiny engine=zero2
zeroscale run model=mt5_base engine=zero3 machine=h200 batch.micro=8 devices_per_node=8 --dry-run
"""

import argparse

from pydantic import ValidationError

from bench import config, launchers
from bench.cli import asking, live, point
from bench.config import Request
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
    asked = config.request(config.single(args.overrides), args.config_dir)
    config.check(asked, asking.device(asked))
    if launchers.load(asked.launcher).QUEUES:
        raise UserError(f"launcher={asked.launcher}", "run measures here and now", "use `zeroscale sweep`")
    if args.dry_run:
        print(asking.as_json(asked) if args.json else asking.line(asked))
        return 0
    if not args.json:
        print(asking.line(asked), flush=True)
    todo = _todo(asked, _study(args.study), tuple(args.overrides))
    with live.line(quiet=args.json) as follow:
        folder, record = point.measure(todo, args.results / args.study, follow, new_repeat=True)
    print(record.model_dump_json(indent=1, by_alias=True) if args.json else asking.result(record))
    if not args.json:
        print(folder)
    return 0 if record.outcome.kind == "ok" else 1


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
