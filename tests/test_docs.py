"""Tests of the documentation pages: links have targets, the reference is up to date, and commands print the output that
the page shows."""

import argparse
import ast
import contextlib
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from analysis import flags
from bench import cli
from bench.cli.run import format_answer
from bench.core import files, store, terminal
from bench.core.errors import UserError
from docs.generate import FOLDER, commands, pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = ("_site", "_pages")
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if not {*MADE} & {*page.parts})]
OTHER_READMES = [ROOT / folder / "README.md" for folder in ("slurm", "slurm/testbed", "tests/data", "results/measured")]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def test_readme_is_short_and_begins_with_a_figure() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    figure = next(number for number, line in enumerate(lines) if line.startswith("!["))
    assert figure < next(number for number, line in enumerate(lines) if line.startswith("## "))


def test_reference_is_up_to_date() -> None:
    written = {page.name: page.read_text() for page in FOLDER.glob("*.md") if page.name != "index.md"}
    assert written == pages(), "run `make reference`"


def test_python_code_of_the_reference_is_valid() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (FOLDER / "python.md").read_text(), flags=re.M | re.DOTALL)
    examples = [block for block in blocks if block.startswith("import ")]
    assert any('{"engine": ["ddp", "zero2"]}' in example for example in examples)
    for example in examples:
        ast.parse(example)


def test_page_of_results_has_each_missed_prediction_and_the_ranges_of_all_that_it_has() -> None:
    """The page of results and the page of predictions have rows about the same predictions. Rows with the same number
    of points and the same mean error are about the same prediction."""
    shown = {
        (int(cells[2]), cells[3]): cells[4]
        for line in (DOCS / "results.md").read_text().splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6 and "to" in cells[4].split()
    }
    matched = set()
    for line in (ROOT / "results/predictions/README.md").read_text().replace(r"\|", "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 9 or not re.fullmatch(r"[\d.]+ (%|points)", cells[4]):
            continue
        keys = [key for key in shown if key[0] == int(cells[1]) and _rounds_to(cells[4], key[1])]
        assert keys or cells[7] == "holds" or "before they were run" in cells[0], cells[0]
        matched |= {key for key in keys if all(map(_rounds_to, cells[5].split(" to "), shown[key].split(" to ")))}
    assert matched == shown.keys()


def _rounds_to(exact: str, shown: str) -> bool:
    """Return True if the text `shown` begins with the number at the beginning of `exact`, rounded to the digits of
    `shown`."""
    number = shown.split()[0].replace("−", "-")
    return abs(float(exact.split()[0]) - float(number)) <= 0.5001 * 10.0 ** -len(number.partition(".")[2])


# ------------------------------------------------------------------------------------------------------------- links

_LINK = re.compile(r"\]\((?![a-z]+:)([^()\s#]*)(?:#([^()\s]*))?\)")


@pytest.mark.parametrize("page", [*PAGES, *OTHER_READMES], ids=lambda page: str(page.relative_to(ROOT)))
def test_each_relative_link_has_a_target(page: Path) -> None:
    for target, anchor in _LINK.findall(_without_code(page.read_text())):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in _anchors(there.read_text()), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_examples_in_the_help_of_a_command_are_valid(verb: str) -> None:
    for command in _commands((FOLDER / "commands.md").read_text()):
        if command.words[0] == verb:
            commands.parser(verb).parse_intermixed_args(command.words[1:])


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and Sphinx generate them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


# ---------------------------------------------------------------------------------------------------------- commands


class Command(NamedTuple):
    """A `zeroscale` command on a page. `output` is the text that the page shows below the command. It is None for a
    command without the prompt `$`, which has no output on the page."""

    words: tuple[str, ...]
    output: str | None


def _commands(text: str) -> Iterator[Command]:
    """Yield the `zeroscale` commands in the console blocks of a page."""
    for block in re.findall(r"^```console\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        shown: Command | None = None
        for line in block.splitlines():
            words = _words(line)
            if line.startswith("$ ") or (words and "$ " not in block):
                if shown:
                    yield shown
                shown = Command(words, "" if line.startswith("$ ") else None) if words else None
            elif shown and shown.output is not None:
                shown = shown._replace(output=f"{shown.output}{line}\n")
        if shown:
            yield shown


def _words(line: str) -> tuple[str, ...]:
    """Return the arguments of a shell line after the word `zeroscale`, up to a pipe or redirection. Environment
    variables before the word are ignored. Return an empty tuple if the line calls another program."""
    found = re.match(r"(?:\$ )?(?:\w+=(?:\"[^\"]*\"|\S*) )*(?:\S*/)?zeroscale (.*)", line)
    words = shlex.split(found[1], comments=True) if found else []
    return tuple(itertools.takewhile(lambda word: word not in (">", "|", "&&"), words))


COMMANDS = [
    pytest.param(command, id=f"{name}: {' '.join(command.words)}"[:100])
    for name, page in zip(NAMES, PAGES, strict=True)
    if page.parent != FOLDER  # this excludes docs/reference, whose commands are tested separately
    for command in dict.fromkeys(_commands(page.read_text()))
]

NEEDS = {
    "status": "a sweep that was submitted",
    "resume": "a sweep that was submitted",
    "cancel": "a sweep that was submitted",
    "logs": "a sweep that was submitted",
    "doctor": "a process for each look at the machine",
    "calibrate": "minutes",
    "ab": "two revisions, and minutes",
    "prepare": "minutes, and a corpus",
    "report": "ten seconds",
    "export": "the extra `mlflow`",
}
"""Commands whose examples are only parsed here, and not run. The value names the thing that a run of the
examples would need. Separate tests run these commands."""


_MT5 = {
    "model_type": "mt5", "vocab_size": 512, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 4, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def sample_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of the pages can run. It has the files that the pages mention."""
    folder = tmp_path_factory.mktemp("house")
    recorded = ROOT / "results" / "measured"
    shutil.copytree(recorded, folder / "results" / "measured")
    for name, runs in {"runs/smoke": "smoke", "runs/paper": "testbed", "before": "smoke", "after": "smoke"}.items():
        files.unpack(recorded / "two_cores.zip" / runs, folder / "results" / name)
    shutil.copytree(ROOT / "results" / "predictions", folder / "results" / "predictions")
    (folder / "my" / "launcher").mkdir(parents=True)
    site = (ROOT / "conf/launcher/slurm.yaml").read_text().replace("gpus: null", 'gpus: "--gres=gpu:{devices}"')
    (folder / "my" / "launcher" / "slurm_mine.yaml").write_text(site)
    page = (DOCS / "guides" / "rented.md").read_text()
    [rented] = re.findall(r"^# my/launcher/vertex_mine.yaml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (folder / "my" / "launcher" / "vertex_mine.yaml").write_text(rented)
    (folder / "my" / "model").mkdir()
    shape = yaml.safe_load((ROOT / "conf" / "model" / "tiny.yaml").read_text())
    shape |= {"name": "mine", "parameters": None}
    (folder / "my" / "model" / "mine.yaml").write_text(yaml.safe_dump(shape))
    (folder / "config.json").write_text(json.dumps(_MT5))
    gpt2 = json.dumps({"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 2})
    (folder / "gpt2.json").write_text(gpt2)
    (folder / "my-model").mkdir()
    (folder / "my-model" / "config.json").write_text(gpt2)
    header = b"{}"  # of a file without tensors, which only a run would refuse
    (folder / "my-model" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "corpus.jsonl").write_text('{"text": "one line"}\n')
    pages = "\n".join(page.read_text() for page in PAGES)
    for name, field in {"pairs.jsonl": "prompt", "chats.jsonl": "messages"}.items():
        [line] = re.findall(rf'^{{"{field}".*$', pages, flags=re.MULTILINE)
        # A page shows one line. A training needs enough lines to hold some out, and `*.jsonl` finds these files, too.
        short = [{"prompt": f"{number}", "answer": f"{number}"[::-1]} for number in range(2000)]
        own = short if field == "prompt" else [{}]
        lines = [json.dumps({**json.loads(line), **one, "text": "one line"}) for one in own]
        (folder / name).write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_page_prints_the_output_shown_below_it(command: Command, sample_folder: Path) -> None:
    verb, *words = command.words
    parser = commands.parser(verb)
    parser.parse_intermixed_args(words)
    if verb in NEEDS:
        assert command.output is None, f"nothing compares what {verb} prints"
        return
    dry = _dry(verb, words, parser)
    printed, code = _printed(sample_folder, (verb, *(dry or words)))
    if command.output is None:
        assert code in (0, 1, 3), printed  # 1 if a gate fails: these records are not those of the page
    elif dry and dry != words and code == 0:
        # A dry run prints the line of a point that the run prints first.
        points = [line for line in printed.splitlines() if re.match(r"[0-9a-f]{10}  ", line)]
        assert points and points[0] in command.output.splitlines()
    else:
        assert re.fullmatch(_pattern(command.output), printed), printed


def test_python_examples_of_the_notebook_guide_open_recorded_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "guides/jupyter.md").read_text(), flags=re.M | re.DOTALL)
    folders = {*re.findall(r'"(results/[^"]+)"', "".join(blocks))}
    assert folders
    for folder in folders:
        assert store.find_records([ROOT / folder]), folder


def test_sample_output_of_run_has_the_present_wording() -> None:
    # A page shows a run on a quiet machine, which a test cannot repeat. So only the wording is compared here.
    records = map(store.read_record, store.find_records([ROOT / "tests/data/runs.zip/smoke"]))
    record = next(record for record in records if record.outcome.kind == "ok")
    real = {re.sub(r"[0-9.,]+", "0", line) for line in format_answer(record, Path("study/point/0.0"), [])}
    [rate] = [line for line in real if "tokens per second" in line]
    samples = [shown.output for name in NAMES for shown in _commands((ROOT / name).read_text())
               if shown.words == ("run",) and shown.output]  # fmt: skip
    assert len(samples) == 2
    for sample in samples:
        assert rate in re.sub(r"[0-9.,]+", "0", sample).splitlines()
    [raised] = [
        ", ".join(re.findall(r"^(?:flags|notes): (.*)$", shown, flags=re.M)) for shown in samples if "…" not in shown
    ]
    for name in raised.split(", "):
        rule = {**flags.FLAGS, **flags.NOTES}[name]
        assert any(terminal.wrap(f"{name}: the run {rule.meaning}", 2) in shown for shown in samples), name


def _dry(verb: str, words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words of a command with --dry-run added. Empty if the command has no such option."""
    if "--dry-run" not in parser.format_help():
        return []
    here = ["machine=cpu", "devices_per_node=2"]  # the test must not depend on this machine's devices
    elsewhere = any(word.startswith(("machine=", "launcher=", "devices_per_node=", "study=")) for word in words)
    return [*words, *([] if elsewhere else here), *(() if "--dry-run" in words else ("--dry-run",))]


def _pattern(output: str) -> str:
    """Return a regular expression that matches the output shown on a page. A line that is only `…` matches any number
    of lines, and `…` within a line matches any text."""
    lines = [
        "(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + " *\n" for line in output.splitlines()
    ]
    return "".join(lines)


def _printed(folder: Path, words: tuple[str, ...]) -> tuple[str, int]:
    """Run a `zeroscale` command in a folder. Return its output, including error messages, and its exit code."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = cli.main(words)
    return out.getvalue(), code


# -------------------------------------------------------------------------------------------------- workflow and site


def test_ci_workflow_of_the_guide_has_a_valid_command() -> None:
    text = (DOCS / "guides" / "ci.md").read_text()
    found = re.search(r'^```yaml title="[^"]+"\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL)
    assert found
    steps = yaml.safe_load(found[1])["jobs"]["compare"]["steps"]
    command = next(step["run"] for step in steps if step.get("run", "").startswith("zeroscale "))
    _, verb, *words = shlex.split(command)
    assert commands.parser(verb).parse_intermixed_args(words).format == "md"


def test_workflow_of_this_repository_runs_a_make_target_and_uploads_its_report() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/smoke.yml").read_text())["jobs"]["smoke"]["steps"]
    target = next(step["run"] for step in steps if "run" in step).removeprefix("make ")
    recipe = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert recipe
    assert f"--out {steps[-1]['with']['path']} " in recipe[1]


def test_invalid_command_of_a_page_is_detected() -> None:
    with pytest.raises((SystemExit, UserError)), contextlib.redirect_stderr(io.StringIO()):
        commands.parser("run").parse_intermixed_args(["--no-such-option"])


@pytest.mark.processes
@pytest.mark.timeout(600)  # it runs the notebooks
@pytest.mark.thorough
def test_site_is_built_without_warnings_and_loads_nothing_external(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    strict = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "-d", str(tmp_path / "read")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *strict, str(DOCS), str(tmp_path / "site")],
        env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r"<(script|link|img)[^>]*(src|href)=\"https?:", page.read_text()), page.name
