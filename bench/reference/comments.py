"""The comments beside the fields of a class and beside the keys of a YAML file: what they mean."""

import functools
import inspect
import io
import re
import tokenize
from pathlib import Path

from pydantic import BaseModel

from bench.spec import Frozen


@functools.cache
def read_field_comments(kind: type[BaseModel]) -> dict[str, str]:
    """Return the comment of every field: beside it, or in the lines just above it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        ours = issubclass(base, BaseModel) and base.__module__.split(".")[0] not in ("pydantic", "builtins")
        if ours and base is not Frozen and "[" not in base.__name__:  # no class that pydantic made
            found |= _parse_comments(inspect.getsource(base))
    return found


def _parse_comments(source: str) -> dict[str, str]:
    """Return comments by field of a class's source."""
    found: dict[str, str] = {}
    lines = source.splitlines()
    trailing = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source) + "\n").readline)
        if token.type == tokenize.COMMENT
    }
    above: list[str] = []
    blank = heading = False
    for number, line in enumerate(lines, start=1):
        if line.startswith("    #"):
            heading = blank if not above else False  # one line of comment after an empty one stands above many fields
            above.append(line.strip("# "))
        elif field := re.match(r"    (\w+): ", line):
            own = [trailing[number]] if number in trailing else []
            found[field[1]] = " ".join(own if heading else [*above, *own])
            above, heading = [], False
        else:
            above, heading = [], False
        blank = not line.strip()
    return {name: note for name, note in found.items() if note and not note.startswith(("type:", "noqa"))}


def read_key_comments(*files: Path) -> dict[str, str]:
    """Return the comments beside the keys of YAML files, by dotted key below the folder's name."""
    found: dict[str, str] = {}
    for file in files:
        within: list[tuple[int, str]] = [] if file.parent.name == "conf" else [(-1, file.parent.name)]
        above: list[str] = []
        for line in file.read_text(encoding="utf-8").splitlines():
            match = re.match(r"( *)([A-Za-z_]\w*):(?: .*?)??(?:  +# (.*))?$", line)
            if match:
                within = [one for one in within if one[0] < len(match[1])] + [(len(match[1]), match[2])]
                if note := match[3] or " ".join(above):
                    found.setdefault(".".join(name for _, name in within), note)
            above = [*above, line.strip("# ")] if line.startswith("#") else []
    return found
