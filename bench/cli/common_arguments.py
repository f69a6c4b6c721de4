"""How a point that is asked for is told."""

import json

from bench.config.compose import Request
from bench.formatting import describe_point
from bench.spec import config_id


def format_line(composed: Request) -> str:
    """Describe a point in one line."""
    return describe_point(composed.spec, config_id(composed.spec))


def format_json(composed: Request) -> str:
    """Return a point with its machine and launcher, for another program."""
    plain = {
        "config_id": config_id(composed.spec),
        "spec": composed.spec.model_dump(mode="json", by_alias=True),
        "machine": composed.machine.model_dump(mode="json"),
        "launcher": {"name": composed.launcher, **composed.launcher_options.model_dump(mode="json")},
    }
    return json.dumps(plain, indent=1)
