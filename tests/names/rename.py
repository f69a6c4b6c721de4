"""Rename identifiers and move modules over the whole tree, as the table `renames.csv` says.

    pip install libcst; python tests/names/rename.py [--check] [TABLE...]

Rows are `kind,scope,old,new`:
`module,,bench.a,bench.b`    a module or package moves; imports, paths and dotted names in texts follow
`name,bench.a,Old,New`       a class, function or constant of that module, wherever it is imported
`word,bench/a.py,old,new`    every identifier `old` in the files under that path (all files where it is empty)

All old names are those before the run. A row whose old name is gone is left out, so that a branch cut before a renaming
can be brought after it by the same table. libcst finds what a name refers to; it is no dependency of the project.
"""

import argparse
import csv
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import libcst as cst
from libcst import matchers
from libcst.metadata import MetadataWrapper, QualifiedNameProvider, QualifiedNameSource, ScopeProvider

HERE = Path(__file__).parent
CODE = ("bench", "analysis", "tests", "docs", "slurm")
TEXTS = ("*.md", "*.toml", "Makefile", "*.yml", "*.yaml", "*.ipynb", "*.cfg", "*.j2", "*.html", ".ci/*")
# What was recorded, and answers that stand as they are.
RECORDED = ("results/", "tests/data/", "tests/golden/", "conf/", "docs/reference/", "docs/CHANGELOG.md", "tests/names/")


class Row(NamedTuple):
    """One line of the table."""

    kind: str
    scope: str
    old: str
    new: str


def read_table(paths: list[Path]) -> list[Row]:
    """Return the rows of all tables; what is no row of four is refused."""
    rows = []
    for path in paths:
        for number, cells in enumerate(csv.reader(path.read_text().splitlines()), 1):
            if not cells or cells[0].startswith(("#", "kind")):
                continue
            if len(cells) != 4 or cells[0] not in ("module", "name", "word") or not cells[2] or not cells[3]:
                sys.exit(f"{path}:{number}: {cells} is no row")
            rows.append(Row(*cells))
    return rows


def list_files(*patterns: str) -> list[Path]:
    """Return the files under version control that match."""
    command = ["git", "ls-files", "-co", "--exclude-standard", *patterns]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    paths = {Path(line) for line in done.stdout.splitlines()}
    return sorted(path for path in paths if path.is_file() and not path.is_symlink() and not is_recorded(path))


def is_recorded(path: Path) -> bool:
    """Say whether a file holds what was recorded, or a reading that is made anew."""
    return (str(path).startswith(RECORDED) and path.suffix != ".py") or path.parent == Path("tests/names")


def module_of(path: Path) -> str:
    """Return the dotted name under which a file is imported."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Table:
    """What each dotted name becomes, and each word in a file."""

    def __init__(self, rows: list[Row], modules: set[str], exports: dict[str, str], defined: set[str]) -> None:
        self.modules = {row.old: row.new for row in rows if row.kind == "module" and row.old in modules}
        for module in sorted(modules):  # what lies under a package that moves, moves with it
            parent = max((old for old in self.modules if module.startswith(old + ".")), key=len, default=None)
            if parent and module not in self.modules:
                self.modules[module] = self.modules[parent] + module[len(parent) :]
        self.names = {f"{row.scope}.{row.old}": row.new for row in rows if row.kind == "name"}
        self.words = [row for row in rows if row.kind == "word"]
        self.words_everywhere = {row.old: row.new for row in self.words if not row.scope}
        self.exports = exports
        self.all_modules = modules
        self.packages = {module for module in modules if Path(*module.split("."), "__init__.py").exists()}
        self._becomes = self._texts(defined)
        within = {old for old, new in self._becomes.items() if new.startswith(f"{old}.")}  # these stay packages
        keys = [re.escape(key) + r"(?!\.\w)" * (key in within) for key in sorted(self._becomes, key=len, reverse=True)]
        self._pattern = re.compile(rf"(?<![\w./])(?:{'|'.join(keys) or '$^'})(?!\w)")

    def _texts(self, defined: set[str]) -> dict[str, str]:
        """Return what each dotted name and path in a text becomes."""
        becomes = {}
        for old, new in self.modules.items():
            was, will = old.replace(".", "/"), new.replace(".", "/")
            end = "/" if old in self.packages else ".py"
            becomes |= {old: new, was + end: will + end}
        for name in {*self.names, *(one for one in defined if one.rpartition(".")[0] in self.modules)}:
            module, _, last = name.rpartition(".")
            becomes[name] = f"{self.new_module(module)}.{self.names.get(name, last)}"
        return becomes

    def rename_text(self, text: str) -> str:
        """Return a text whose dotted names and paths follow."""
        return self._pattern.sub(lambda match: self._becomes[match[0]], text)

    def origin(self, name: str) -> str:
        """Return where a dotted name is defined: what packages export again is followed."""
        while known := next((one for one in _prefixes(name) if one in self.exports), None):
            name = self.exports[known] + name[len(known) :]
        return name

    def new_name(self, name: str) -> str | None:
        """Return the new last part of a dotted name, None where it stays."""
        return self.names.get(self.origin(name))

    def new_module(self, name: str) -> str:
        """Return the new dotted name of a module."""
        return self.modules.get(name, name)

    def words_in(self, path: Path) -> dict[str, str]:
        """Return the words that change in a file; the longest scope decides."""
        found = [row for row in self.words if str(path).startswith(row.scope)]
        return {row.old: row.new for row in sorted(found, key=lambda row: len(row.scope))}


def _prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name and what it is in, the longest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _is_all(node: cst.Assign) -> bool:
    """Say whether this is a module's list of what it offers."""
    return any(isinstance(one.target, cst.Name) and one.target.value == "__all__" for one in node.targets)


class Renamer(cst.CSTTransformer):
    """Renames within one file."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, ScopeProvider)

    def __init__(self, table: Table, path: Path, imports: dict[str, str]) -> None:
        super().__init__()
        self.table, self.path, self.module = table, path, module_of(path)
        self.words = table.words_in(path)
        self.clashes: set[str] = set()
        self.members: set[cst.CSTNode] = set()  # attributes and keywords: no names of a scope
        self.imports = imports
        self.annotations = 0  # how deep in annotations, where strings are code

    def _qualified(self, node: cst.CSTNode) -> str | None:
        """Return the dotted name that a node refers to, if it is one of the tree's."""
        for one in self.get_metadata(QualifiedNameProvider, node, set()) or ():
            if one.source is QualifiedNameSource.IMPORT:
                return str(one.name)
            if one.source is QualifiedNameSource.LOCAL and "." not in one.name:
                return f"{self.module}.{one.name}"
        return None

    def _new(self, node: cst.Name) -> str | None:
        """Return what a bare name becomes."""
        name = self._qualified(node)
        if name is None:
            return self.words.get(node.value)
        if name in self.table.modules and node.value == name.rpartition(".")[2]:
            return self.table.modules[name].rpartition(".")[2]
        new = self.table.new_name(name)
        if new is not None and node.value == self.table.origin(name).rpartition(".")[2]:
            return new
        imported = not name.startswith(self.module + ".") or self.table.origin(name) != name
        aliased = node.value != name.rpartition(".")[2] or self._is_beside(name)
        return (self.table.words_everywhere if imported and not aliased else self.words).get(node.value)

    def _is_beside(self, name: str) -> bool:
        """Say whether a name is of a script's neighbour, found by the folder and no package."""
        return (self.path.parent / f"{name.partition('.')[0]}.py").exists()

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self.members.add(node.attr)

    def visit_Arg(self, node: cst.Arg) -> None:
        if node.keyword is not None:
            self.members.add(node.keyword)

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self.annotations += 1

    def leave_Annotation(self, original_node: cst.Annotation, updated_node: cst.Annotation) -> cst.Annotation:
        self.annotations -= 1
        return updated_node

    def visit_Assign(self, node: cst.Assign) -> None:
        self.annotations += _is_all(node)

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        self.annotations -= _is_all(original_node)
        return updated_node

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        text = self.table.rename_text(original_node.value)
        if self.annotations:
            text = re.sub(r"(?<![\w.])[A-Za-z_][\w.]*", lambda match: self._rename_quoted(match[0]), text)
        return updated_node.with_changes(value=text)

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        return updated_node.with_changes(value=self.table.rename_text(original_node.value))

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:
        return updated_node.with_changes(value=self.table.rename_text(original_node.value))

    def _rename_quoted(self, text: str) -> str:
        """Return what a name in a quoted annotation becomes, imported or defined here."""
        first, dot, rest = text.partition(".")
        dotted = self.imports.get(first, f"{self.module}.{first}")
        if dotted in self.table.all_modules and dot:
            module = self.table.new_module(dotted).rpartition(".")[2] if first == dotted.rpartition(".")[2] else first
            return f"{module}.{self.table.new_name(f'{dotted}.{rest}') or rest}"
        new = self.table.new_name(dotted)
        return new + dot + rest if new and self.table.origin(dotted).rpartition(".")[2] == first else text

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Names in strings: setattr(module, "name", ...), getattr(module, "name")."""
        called = original_node.func.attr if isinstance(original_node.func, cst.Attribute) else original_node.func
        if getattr(called, "value", "") == "TypeVar" and isinstance(original_node.args[0].value, cst.SimpleString):
            name = self._rename_quoted(str(original_node.args[0].value.evaluated_value))
            first = updated_node.args[0].with_changes(value=cst.SimpleString(f'"{name}"'))
            return updated_node.with_changes(args=[first, *updated_node.args[1:]])
        words = [argument.value for argument in original_node.args[:2]]
        if getattr(called, "value", "") not in ("setattr", "getattr") or len(words) < 2:
            return updated_node
        module, text = self.table.origin(self._qualified(words[0]) or ""), words[1]
        if module not in self.table.all_modules or not isinstance(text, cst.SimpleString):
            return updated_node
        new = self.table.new_name(f"{module}.{text.evaluated_value}")
        if new is None:
            return updated_node
        arguments = list(updated_node.args)
        arguments[1] = arguments[1].with_changes(value=cst.SimpleString(f'"{new}"'))
        return updated_node.with_changes(args=arguments)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        member = original_node in self.members
        new = self.words.get(original_node.value) if member else self._new(original_node)
        if new is None or new == original_node.value:
            return updated_node
        if member:
            return updated_node.with_changes(value=new)
        scope = self.get_metadata(ScopeProvider, original_node, None)
        if scope is not None:
            for other in scope[new]:
                if getattr(other, "name", None) == new and type(other).__name__ != "BuiltinAssignment":
                    kept = not isinstance(getattr(other, "node", None), cst.CSTNode) or self._stays(other, new)
                    if kept:
                        self.clashes.add(f"{self.path}: {original_node.value} -> {new} stands there already")
        return updated_node.with_changes(value=new)

    def _stays(self, assignment: object, name: str) -> bool:
        """Say whether a binding keeps its name, so that another must not get it."""
        node = getattr(assignment, "node", None)
        target = getattr(node, "name", node)
        if isinstance(target, cst.Name) and target.value == name:
            return self._new(target) in (None, name)
        return name not in self.words

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        name = self._qualified(original_node)
        if name is None:
            return updated_node
        if name in self.table.modules:  # import bench.a; bench.a.b(...)
            return cst.parse_expression(self.table.modules[name])
        new = self.table.new_name(name)
        if original_node.attr.value != name.rpartition(".")[2]:
            return updated_node
        if new is None and name.rpartition(".")[0] in self.table.all_modules:
            new = self.table.words_everywhere.get(original_node.attr.value, original_node.attr.value)
        return updated_node if new is None else updated_node.with_changes(attr=cst.Name(new))

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.SimpleStatementLine]:
        if len(original_node.body) != 1 or not isinstance(original_node.body[0], (cst.ImportFrom, cst.Import)):
            return updated_node
        statement = original_node.body[0]
        made = self._import_from(statement) if isinstance(statement, cst.ImportFrom) else self._import(statement)
        if made is None:
            return updated_node.with_changes(body=original_node.body)
        first, *rest = made
        lines = [updated_node.with_changes(body=[first])]
        lines += [cst.SimpleStatementLine([one]) for one in rest]
        return cst.FlattenSentinel(lines)

    def _import(self, node: cst.Import) -> list[cst.BaseSmallStatement] | None:
        names = []
        for alias in node.names:
            dotted = self.table.new_module(cst.Module([]).code_for_node(alias.name))
            names.append(alias.with_changes(name=cst.parse_expression(dotted)))
        return [node.with_changes(names=names)]

    def _import_from(self, node: cst.ImportFrom) -> list[cst.BaseSmallStatement] | None:
        if node.relative or node.module is None or isinstance(node.names, cst.ImportStar):
            return None
        module = cst.Module([]).code_for_node(node.module)
        groups: dict[str, list[cst.ImportAlias]] = defaultdict(list)
        for alias in node.names:
            old = str(alias.evaluated_name)
            dotted = f"{module}.{old}"
            if dotted in self.table.all_modules:
                parent, _, new = self.table.new_module(dotted).rpartition(".")
            else:
                parent = self.table.new_module(module)
                words = self.words if self._is_beside(module) else self.table.words_everywhere
                new = self.table.new_name(dotted) or words.get(old, old)
            changed = alias.with_changes(name=cst.Name(new), comma=cst.MaybeSentinel.DEFAULT)
            if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
                own = alias.asname.name
                asname = cst.Name(self._new(own) or own.value)
                changed = changed.with_changes(asname=alias.asname.with_changes(name=asname))
            groups[parent].append(changed)
        if not groups:
            return None
        made: list[cst.BaseSmallStatement] = []
        for parent, names in groups.items():
            brackets = {} if len(groups) > 1 else {"lpar": node.lpar, "rpar": node.rpar}
            if len(groups) > 1:
                brackets = {"lpar": None, "rpar": None}
            made.append(node.with_changes(module=cst.parse_expression(parent), names=names, **brackets))
        return made


def rename_code(table: Table, path: Path, text: str) -> tuple[str, set[str]]:
    """Return a module's text under the new names, and what clashes in it."""
    module = cst.parse_module(text)
    renamer = Renamer(table, path, dict(find_imports(module)))
    code = MetadataWrapper(module, unsafe_skip_copy=True).visit(renamer).code
    return code, renamer.clashes


def rename_file(table: Table, path: Path) -> tuple[str, set[str]]:
    """Return `rename_code` of a file."""
    return rename_code(table, path, path.read_text())


def rename_examples(table: Table, text: str) -> str:
    """Return a page whose Python blocks that are files follow as well."""
    parts = re.split(r'(^```python title="([^"]+)"\n)(.*?)(^```$)', text, flags=re.MULTILINE | re.DOTALL)
    for index in range(3, len(parts), 5):
        parts[index] = rename_code(table, Path(parts[index - 1]), parts[index])[0]
    return "".join(part for index, part in enumerate(parts) if index % 5 != 2)


def find_imports(node: cst.CSTNode) -> Iterator[tuple[str, str]]:
    """Yield every name that imports bind, with the dotted name that it stands for."""
    for statement in matchers.findall(node, matchers.ImportFrom()):
        if isinstance(statement, cst.ImportFrom) and not isinstance(statement.names, cst.ImportStar):
            source = cst.Module([]).code_for_node(statement.module) if statement.module else ""
            for alias in statement.names if source.partition(".")[0] in CODE else ():
                yield str(alias.evaluated_alias or alias.evaluated_name), f"{source}.{alias.evaluated_name}"


def find_exports(files: list[Path], modules: set[str]) -> dict[str, str]:
    """Return which dotted names are other dotted names, imported into a module at its top."""
    exports = {}
    for path in files:
        lines = [node for node in cst.parse_module(path.read_text()).body if isinstance(node, cst.SimpleStatementLine)]
        for name, dotted in (pair for line in lines for pair in find_imports(line)):
            if f"{module_of(path)}.{name}" not in modules:
                exports[f"{module_of(path)}.{name}"] = dotted
    return exports


def find_defined(files: list[Path]) -> Iterator[str]:
    """Yield the dotted names of what modules define."""
    for path in files:
        for node in cst.parse_module(path.read_text()).body:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                yield f"{module_of(path)}.{node.name.value}"
            for statement in node.body if isinstance(node, cst.SimpleStatementLine) else ():
                targets = [one.target for one in statement.targets] if isinstance(statement, cst.Assign) else []
                targets += [statement.target] if isinstance(statement, cst.AnnAssign) else []
                for target in targets:
                    parts = [one.value for one in target.elements] if isinstance(target, cst.Tuple) else [target]
                    yield from (f"{module_of(path)}.{part.value}" for part in parts if isinstance(part, cst.Name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", type=Path, default=[HERE / "renames.csv"])
    parser.add_argument("--check", action="store_true", help="say what clashes, and write nothing")
    args = parser.parse_args()
    files = list_files(*(f"{folder}/*.py" for folder in CODE))
    ours = [path for path in files if path.parts[0] in ("bench", "analysis", "slurm", "docs")]
    modules = {module_of(path) for path in files}
    defined = set(find_defined(ours))
    rows = [row for row in read_table(args.tables) if row.kind != "name" or f"{row.scope}.{row.old}" in defined]
    table = Table(rows, modules, find_exports(files, modules), defined)
    with ProcessPoolExecutor() as pool:
        done = pool.map(partial(rename_file, table), files, chunksize=8)
        written, clashing = zip(*done, strict=True)
    clashes = set().union(*clashing)
    for clash in sorted(clashes):
        print(f"clash: {clash}")
    if args.check:
        return bool(clashes)
    for path in list_files(*TEXTS):
        text = path.read_text()
        changed = table.rename_text(rename_examples(table, text))
        if changed != text:
            path.write_text(changed)
    for path, text in zip(files, written, strict=True):
        if text != path.read_text():
            path.write_text(text)
    move_modules(table)
    return 0


def move_modules(table: Table) -> None:
    """Move the files, and make packages of folders that are new."""
    for old, new in table.modules.items():
        was, will = Path(*old.split(".")), Path(*new.split("."))
        if old in table.packages:
            move(was / "__init__.py", will / "__init__.py")
        else:
            move(was.with_suffix(".py"), will.with_suffix(".py"))
    for old in (
        table.packages & table.modules.keys()
    ):  # templates and the like beside the modules of a folder that moves
        was, will = Path(*old.split(".")), Path(*table.modules[old].split("."))
        for path in list_files(f"{was}/*"):
            move(path, will / path.relative_to(was))
    for old, new in table.modules.items():
        init = Path(*new.split(".")).parent / "__init__.py"
        if old.rpartition(".")[0] in table.packages and not init.exists():
            init.write_text("")


def move(was: Path, will: Path) -> None:
    """Move a file under version control."""
    will.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["git", "mv", str(was), str(will)], check=True)


if __name__ == "__main__":
    sys.exit(main())
