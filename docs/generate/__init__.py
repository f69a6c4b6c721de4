"""The pages of docs/reference, written from the code that they describe.

pages     every page by name, as text
verbs     what the command takes, read off its parsers
fields    what a value holds: keys with type, default and meaning, read off its class and the comments beside its fields
tree      the rooms of the packages, by their docstrings
notebooks the notebooks as pages of the site, run when it is made; not written by `make reference`
readings  what reading shows: columns, quantities, flags, figures, outcomes, records, the Python face
"""

from pathlib import Path

from docs.generate import fields, readings, tree, verbs

FOLDER = Path(__file__).parents[1] / "reference"

_NOTE = "<!-- Written by `make reference` from the code: edit that, not this page. -->"


def pages() -> dict[str, str]:
    """Return the text of every generated page by its file's name."""
    written = {
        "verbs.md": verbs.page(),
        "config.md": fields.config_page(),
        "columns.md": readings.columns_page(),
        "outcomes.md": readings.outcomes_page(),
        "record.md": fields.record_page(),
        "python.md": readings.python_page(),
        "tree.md": tree.page(),
    }
    return {name: f"{_NOTE}\n\n{text.strip()}\n" for name, text in written.items()}
