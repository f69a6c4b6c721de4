"""Find prose that is hard to read, by three rules that a program can check.

The rules concern the first word of a docstring, pronouns that stand for persons, and sentences that are too long.

  python -m tests.prose [PATH ...]

docs/CONTRIBUTING.md has all rules.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "analysis", "slurm", "tests", "docs/generate")

FIRST_WORDS = re.compile(r"(What|Whoever|Where|Whether|Whose|Who|Which|That)\b")
"""Words with which a docstring must not begin. A docstring begins with a verb or with the noun that the thing is."""
STAND_INS = re.compile(r"\b(nobody|somebody|whoever|is told|are told|was told)\b", re.IGNORECASE)
LONGEST = 35
"""Maximum number of words in a sentence."""

_SENTENCE_END = re.compile(r"[.!?:;](?=\s|$)|\n\s*\n|\n\s*(?:[-*|>]|\d+\.)|\n {2,}")
_MESSAGE_CALLS = ("print", "UserError", "echo", "add_argument", "Field", "warning", "info", "error", "fail")


def find_in_text(text: str, *, is_docstring: bool) -> Iterator[str]:
    """Yield a description of each finding (a violation of a rule) in one docstring or message."""
    if is_docstring and (first := FIRST_WORDS.match(text.strip())):
        yield f"begins with {first[0]!r}: begin with a verb or a noun"
    for found in STAND_INS.finditer(text):
        yield f"{found[0]!r}: name the component"
    for sentence in _SENTENCE_END.split(text):
        if (count := len(re.findall(r"[\w'’./=-]*\w", sentence))) > LONGEST:
            yield f"a sentence of {count} words: at most {LONGEST}"


def find_in_source(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and description of each finding in Python source. Docstrings and the strings passed to
    printing calls are checked."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for finding in find_in_text(node.value.value, is_docstring=True):
                yield node.lineno, finding
        elif isinstance(node, ast.Call) and _get_name(node.func).endswith(_MESSAGE_CALLS):
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                for finding in find_in_text(_get_text(argument), is_docstring=False):
                    yield argument.lineno, finding


def _get_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _get_text(argument: ast.expr) -> str:
    """Return the text of a string literal. In an f-string, a formatted value counts as one word. Empty for other
    expressions."""
    if isinstance(argument, ast.Constant):
        return argument.value if isinstance(argument.value, str) else ""
    if isinstance(argument, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "value" for part in argument.values)
    return ""


def main(words: list[str]) -> int:
    paths = [Path(word) for word in words] or [ROOT / folder for folder in FOLDERS]
    files = sorted(file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path]))
    count = 0
    for file in files:
        for line, finding in sorted(find_in_source(file.read_text(encoding="utf-8"))):
            count += 1
            print(f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}:{line}: {finding}")
    print(f"{count:,} findings in {len(files):,} files")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
