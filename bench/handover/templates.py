"""The templates of a handover, with what quotes values for a shell and for sbatch."""

import functools
import shlex
from pathlib import Path

import jinja2

from bench.launchers.slurm.script import directive


@functools.cache
def template(name: str) -> jinja2.Template:
    """Return a file of `files/` as a template; a name that it uses and nobody gives is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("files")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"directive": directive, "shell": lambda value: shlex.quote(str(value))}
    return environment.get_template(name)
