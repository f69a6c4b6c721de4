"""Measure one point here and now, with real processes.

zeroscale run model=tiny engine=zero2
zeroscale run model=mt5_base engine=zero3 machine=h200 batch.micro=8 devices_per_node=8 --dry-run
"""

import argparse
import json

from pydantic import ValidationError

from bench import config, store
from bench.cli import asking, point
from bench.config import Request
from bench.errors import UserError
from bench.spec import config_id
from bench.study import Study


def arguments(parser: argparse.ArgumentParser) -> None:
    asking.arguments(parser)
    parser.add_argument("--study", default="adhoc", metavar="NAME", help="folder of the results; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Return 0 if the run ended `ok`."""
    asked = config.request(config.single(args.overrides), args.config_dir)
    config.check(asked, asking.here(asked))
    if args.dry_run:
        print(_json(asked) if args.json else asking.line(asked))
        return 0
    if not args.json:
        print(asking.line(asked), flush=True)
    study = _study(args.study)
    repeat = store.next_repeat(args.results / study.name / config_id(asked.spec))
    with asking.live(quiet=args.json) as follow:
        folder, record = point.measure(asked, args.results, study, repeat, tuple(args.overrides), follow)
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


def _json(asked: Request) -> str:
    plain = {
        "config_id": config_id(asked.spec),
        "spec": asked.spec.model_dump(mode="json", by_alias=True),
        "machine": asked.machine.model_dump(mode="json"),
        "launcher": {"name": asked.launcher, **asked.launcher_options.model_dump(mode="json")},
    }
    return json.dumps(plain, indent=1)
