"""Pages of docs/reference, generated from the code that they describe.

pages      returns the text of every generated page, by file name.
commands   the arguments of every command, from its parser.
fields     the config keys and record fields, with type, default and meaning, from their classes and comments.
tree       the packages and modules, from their docstrings.
notebooks  the notebooks as pages. They are run when the site is built, and not by `make reference`.
readings   columns, metrics, figures, outcomes and quality flags of runs, and the Python interface.
"""

from pathlib import Path

from docs.generate import commands, fields, readings, tree

FOLDER = Path(__file__).parents[1] / "reference"

_NOTE = "<!-- Written by `make reference` from the code: edit that, not this page. -->"


def pages() -> dict[str, str]:
    """Return the text of every generated page, by file name."""
    written = {
        "commands.md": commands.page(),
        "config.md": fields.config_page(),
        "columns.md": readings.columns_page(),
        "outcomes.md": readings.outcomes_page(),
        "record.md": fields.record_page(),
        "python.md": readings.python_page(),
        "tree.md": tree.page(),
    }
    return {name: f"{_NOTE}\n\n{text.strip()}\n" for name, text in written.items()}
