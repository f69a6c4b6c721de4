"""Measure one point here and now, with real processes.

zeroscale run model=tiny engine=zero2
zeroscale run model=mt5_base engine=zero3 machine=h200 batch.micro=8 devices_per_node=8 --dry-run
"""

import argparse
import json

from bench import config, store
from bench.cli import asking, point
from bench.config import Request
from bench.spec import config_id


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
    repeat = store.next_repeat(args.results / args.study / config_id(asked.spec))
    with asking.live(quiet=args.json) as follow:
        folder, record = point.measure(asked, args.results, args.study, repeat, tuple(args.overrides), follow)
    print(record.model_dump_json(indent=1, by_alias=True) if args.json else asking.result(record))
    if not args.json:
        print(folder)
    return 0 if record.outcome.kind == "ok" else 1


def _json(asked: Request) -> str:
    plain = {
        "config_id": config_id(asked.spec),
        "spec": asked.spec.model_dump(mode="json", by_alias=True),
        "machine": asked.machine.model_dump(mode="json"),
        "launcher": {"name": asked.launcher, **asked.launcher_options.model_dump(mode="json")},
    }
    return json.dumps(plain, indent=1)
