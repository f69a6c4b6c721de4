"""Fill a folder with every wheel that zeroscale needs on a machine without a network, which has torch already.

  make wheels                                     for a machine with this Python, torch and transformers
  make wheels WHEELS="--python 3.12 --have have.txt"   for another Python, and without what that machine has

`have.txt` is what `python3 -m pip list --format=freeze` prints there, or plain names: what it has in a version that
suits is left out, so that nothing stands before what its torch and transformers were installed with. Versions are those
of constraints.txt. The other machine must have this one's kind of processor, and a C library that is no older.
"""

import argparse
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Set
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.tags import platform_tags
from packaging.utils import canonicalize_name

from bench.processes import build_module_command

ROOT = Path(__file__).parents[2]
THERE = ("torch", "transformers")
"""What a machine that trains has anyhow."""
CHECKS = ("pytest", "pytest-timeout")
"""What the tests there are run with."""


def main() -> int:
    """Return 0 once the folder holds every wheel; it is replaced as a whole."""
    parser = argparse.ArgumentParser(
        "python -m bench.gpu_study.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=running, metavar="X.Y", help="the Python of that machine (%(default)s)")
    parser.add_argument("--have", type=Path, metavar="FILE", help="what that machine has already")
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME==VERSION", help="further packages")
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="(%(default)s)")
    args = parser.parse_args()
    if args.out.is_dir() and any(path.suffix != ".whl" for path in args.out.iterdir()):
        raise SystemExit(f"--out {args.out}: holds more than wheels, and is replaced as a whole; name another folder")
    if not (ROOT / "constraints.txt").is_file():
        raise SystemExit("wheels: are built of a checkout, and this is an installed package; call it in a checkout")
    have = dict(_parse_packages(args.have.read_text())) if args.have else {}
    needed = [*list_required(args.python, have), *args.also]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=args.out.parent, prefix=".wheels-"))
    try:
        for requirement in needed:
            _fetch_wheel(requirement, aside, args.python, running)
        _call_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(aside), str(ROOT))
        shutil.rmtree(args.out, ignore_errors=True)
        aside.rename(args.out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    found = list(args.out.glob("*.whl"))
    print(f"{args.out}: {len(found)} wheels, {sum(file.stat().st_size for file in found) / 2**20:.1f} MiB; there:")
    print(f"  python3 -m pip install --no-index --no-deps --no-compile --target DIR {args.out}/*.whl")
    print("  export PYTHONPATH=DIR")
    return 0


def list_required(python: str, have: Mapping[str, str]) -> list[str]:
    """Return name==version of all that zeroscale with its extra `run` needs, and the machine has not; `have` is by
    canonical name, an empty version for one that is not known."""
    pinned = dict(_parse_packages((ROOT / "constraints.txt").read_text()))
    roots = [Requirement("zeroscale[run]"), *map(Requirement, CHECKS)]
    names = _list_closure(roots, python, dict.fromkeys(THERE, "") | dict(have)) - {"zeroscale"}
    return [f"{name}=={pinned.get(name) or metadata.version(name)}" for name in sorted(names)]


def _list_closure(roots: Iterable[Requirement], python: str, have: Mapping[str, str]) -> set[str]:
    """Return the canonical names of `asked` and of everything they need in turn, but for what `have` satisfies."""
    found: set[str] = set()
    waiting = list(roots)
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        one = waiting.pop()
        name, key = canonicalize_name(one.name), (canonicalize_name(one.name), frozenset(one.extras))
        if key in seen or (name in have and (not have[name] or one.specifier.contains(have[name], prereleases=True))):
            continue
        seen.add(key)
        found.add(name)
        waiting += _list_requirements(one, python)
    return found


def _list_requirements(one: Requirement, python: str) -> Iterator[Requirement]:
    """Yield what an installed distribution, with the extras asked for, requires on Linux and that Python."""
    try:
        texts = metadata.requires(one.name) or []
    except metadata.PackageNotFoundError:  # for other systems, or other versions of Python, only
        return
    there: dict[str, str | Set[str]] = {**default_environment()}  # type: ignore[dict-item]
    there |= {"python_version": python, "python_full_version": f"{python}.0"}
    for text in texts:
        needed = Requirement(text)
        if not needed.marker or any(needed.marker.evaluate({**there, "extra": extra}) for extra in ("", *one.extras)):
            yield needed


def _parse_packages(text: str) -> Iterator[tuple[str, str]]:
    """Yield canonical name and version, which may be missing, of every line of a list of packages."""
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z0-9][\w.-]*)(?:\[.*\])?(?:==([^\s;+]+))?", line.strip()):
            yield canonicalize_name(match[1]), match[2] or ""


def _fetch_wheel(requirement: str, folder: Path, python: str, running: str) -> None:
    """Download a wheel, or build one that fits any Python where none is offered."""
    elsewhere = []
    if python != running:
        abi = f"cp{python.replace('.', '')}"
        tags = [("--abi", tag) for tag in (abi, "abi3", "none")] + [("--platform", tag) for tag in platform_tags()]
        elsewhere = ["--python-version", python, "--implementation", "cp", *itertools.chain(*tags)]
    if _call_pip(
        "download", "--no-deps", "--only-binary=:all:", *elsewhere, "-d", str(folder), requirement, quietly=True
    ):
        return
    before = set(folder.iterdir())
    _call_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), requirement)
    (built,) = set(folder.iterdir()) - before
    if python != running and not built.name.endswith("-none-any.whl"):
        raise SystemExit(f"{requirement}: no wheel is offered for Python {python}, and {built.name} is for {running}")


def _call_pip(*words: str, quietly: bool = False) -> bool:
    """Call pip; where it fails, return False or end the program."""
    command = build_module_command("pip", "--disable-pip-version-check", words[0], "--quiet", *words[1:])
    done = subprocess.run(command, capture_output=quietly, check=False)
    if done.returncode and not quietly:
        raise SystemExit(f"failed: {' '.join(command[1:])}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
