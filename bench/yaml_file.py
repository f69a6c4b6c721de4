"""YAML files that users write: read as OmegaConf reads them, or refused in one line that names the file."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from bench.errors import UserError

_MOST_VALUES = 100_000
"""With aliases written out: a few lines of them can stand for more than any memory holds."""


def read(path: Path, called: str) -> dict[str, Any]:
    """Return the file's keys and values, interpolations left as they are; UserError, which begins with `called`, for
    what is no mapping of words to values."""
    try:
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if _count_values(tree, {}) > _MOST_VALUES:
            raise _build_error(path, called, f"more than {_MOST_VALUES:,} values, aliases written out")
        plain = OmegaConf.to_container(OmegaConf.load(path)) if isinstance(tree, yaml.MappingNode) else None
    except UserError:
        raise
    except Exception as error:  # OmegaConf and yaml raise whatever they like for a file that is none
        raise _build_error(path, called, format_reason(error)) from error
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise _build_error(path, called, "not a mapping of words to values")
    return {str(key): value for key, value in plain.items()}


def format_reason(error: Exception) -> str:
    """Return in one line why a file could not be read."""
    if isinstance(error, RecursionError):
        return "contains itself, or is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not text in UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        context = f"{error.context}: " if error.context else ""
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        return f"{context}{error.problem}{where}"
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join(first.split())[:200]


def _build_error(path: Path, called: str, why: str) -> UserError:
    shown = str(path) if str(path).isprintable() else repr(str(path))
    return UserError(called, f"{shown}: {why}", "correct the file")


def _count_values(node: yaml.Node | None, known: dict[int, int | None]) -> int:
    """Return how many values stand below a node, one that is shared counted wherever it stands; RecursionError for one
    that contains itself."""
    if node is None:
        return 0
    if id(node) not in known:
        known[id(node)] = None
        below = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
        parts = [part for pair in below for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    if (count := known[id(node)]) is None:
        raise RecursionError
    return count
