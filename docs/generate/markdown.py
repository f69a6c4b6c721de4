"""Helpers that format tables and texts as Markdown."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Bars (`|`) in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    """Return a text in backquotes. An empty text stays empty."""
    return f"`{text}`" if text else ""


def plain(text: str) -> str:
    """Return a text with Markdown's special characters escaped, except within backquotes."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*\[])", r"\\\1", part) for part in parts)


def prose(docstring: str) -> str:
    """Return a docstring as Markdown. Its indented blocks become console code blocks. Fenced code is not changed."""
    blocks = []
    for part in re.split(r"^(```.*?^```)$", docstring.strip(), flags=re.DOTALL | re.MULTILINE):
        if part.startswith("```"):
            blocks.append(part)
            continue
        for block in filter(None, part.strip("\n").split("\n\n")):
            lines = block.splitlines()
            if all(line.startswith("  ") for line in lines):
                shown = "\n".join(line[2:] for line in lines)
                blocks.append(f"```console\n{shown}\n```")
            else:
                blocks.append(plain(block))
    return "\n\n".join(blocks)
