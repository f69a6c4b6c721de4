"""Each configuration as files that Hydra composes and a command that measures it again."""

import hashlib
import json
import shlex
from typing import Any, NamedTuple

from bench.point_fields import flatten
from bench.spec import RunSpec

CONF = "conf"


class RepeatCommand(NamedTuple):
    """A configuration that can be repeated: its group files by path, and the command, to be given beside them."""

    files: dict[str, bytes]
    command: str


def build_repeat_command(spec: RunSpec) -> RepeatCommand:
    """Return the files and the command for `spec`: nothing is left to the defaults of the zeroscale that repeats it.

    A group's file is named after its content, so that it hides none of zeroscale's own and is not hidden by one. It is
    JSON, which is YAML as well: readers of YAML do not agree on which plain words are numbers.
    """
    plain = spec.model_dump(mode="json", by_alias=True)
    plain["batch"].pop("global")  # follows from the others
    files, overrides = {}, []
    for group in ("model", "engine", "data"):
        content = plain.pop(group)
        text = json.dumps({**content.pop("options", {}), **content}, indent=1, ensure_ascii=False) + "\n"
        name = f"{content['name'].replace('.', '_')}_b{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        files[f"{CONF}/{group}/{name}.yaml"] = text.encode()
        overrides.append(f"{group}={name}")
    overrides += [f"{key}={_format_override(value)}" for key, value in flatten(plain)]
    return RepeatCommand(files, shlex.join(["zeroscale", "run", "--config-dir", CONF, *overrides]))


def _format_override(value: Any) -> str:
    """Write a value as Hydra's grammar reads it: as JSON, but for plain words."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
