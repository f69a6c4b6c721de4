"""Helper for tests of plug-in packages. A package is installed next to zeroscale for the duration of a test."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.core import installed_plugins, plugins

Install = Callable[[str, str, str], None]
"""Function that installs a package of one module with an entry point. Its arguments are the entry point's group, the
entry point (`name = module`), and the module's source text."""


@contextmanager
def installing(folder: Path) -> Iterator[Install]:
    """Yield a function that installs plug-in packages into `folder`, which must be on Python's path. At the end, the
    modules of these packages are removed from `sys.modules`."""
    modules: list[str] = []

    def install(group: str, entry: str, text: str) -> None:
        modules.append(entry.partition("=")[2].strip())
        (folder / f"{modules[-1]}.py").write_text(text)
        info = folder / "somebodys_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
        forget()

    yield install
    for name in modules:
        sys.modules.pop(name, None)


def forget() -> None:
    """Clear the caches in which plug-ins are looked up. After this, the next lookup finds packages that were added, and
    no longer finds packages that were removed."""
    installed_plugins.find_entries.cache_clear()
    installed_plugins.warned.clear()
    plugins._import_complete.cache_clear()
