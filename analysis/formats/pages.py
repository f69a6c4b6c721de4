"""How a page is made: a template of its own room, beside those of the report, whose look all pages share."""

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template


def load_template(package: str, name: str) -> Template:
    """Return a template of `package` or of the report; what it is given is escaped, and an unknown name fails."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("analysis.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
