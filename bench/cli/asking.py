"""How a point that is asked for is told."""

import json

from bench.config import Request
from bench.spec import config_id
from bench.wording import describe


def line(asked: Request) -> str:
    """Describe a point in one line."""
    return describe(asked.spec, config_id(asked.spec))


def as_json(asked: Request) -> str:
    """Return a point with its machine and launcher, for another program."""
    plain = {
        "config_id": config_id(asked.spec),
        "spec": asked.spec.model_dump(mode="json", by_alias=True),
        "machine": asked.machine.model_dump(mode="json"),
        "launcher": {"name": asked.launcher, **asked.launcher_options.model_dump(mode="json")},
    }
    return json.dumps(plain, indent=1)
