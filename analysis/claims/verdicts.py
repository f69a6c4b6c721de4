"""Verdict on each published claim: the rule that decides which comparisons test a claim, the verdict, and its reason.

A finding holds all comparisons for a claim on one machine with one model. Findings that do not meet the rule, such as
those of a tiny model on a CPU, are called analogues. They are never called a reproduction.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, get_args

import pandas as pd

from analysis.claims import VERDICTS, Claim, ClaimComparison, ClaimFinding, Effect, Starts, Verdict
from analysis.claims.findings import find_findings, name_effects
from analysis.claims.sources import CLAIMS, SMALL, STUDY, read_published
from analysis.formats import MISSING, format_markdown_table, format_significant
from analysis.results import Results
from analysis.stats.compare import EQUAL, INTEREST, LEAST_RUNS
from analysis.table import group_by, list_rows
from bench.core.formatting import format_count
from bench.core.spec import RunSpec

SMALLEST, LARGEST = 580e6, 13e9
"""Smallest and largest parameter count of the models in the ZeRO study, from its abstract."""
LARGE = 1e9
"""Smallest parameter count of a large model, as in the other publications."""

DOUBTFUL = ("short", "straggler", "busy")
"""Flags that exclude a comparison from testing a claim. A configuration is flagged busy only if all of its runs are."""

TEXT = (
    f"Rule for a test of a claim of {STUDY}. The model is an mT5 of 580M to 13B parameters, with the parameter count "
    "of a published shape; for C3 it is mT5-XXL. It ran on GPUs of one machine type and environment class, on two or "
    "more node counts. For C1, the work per step is the same on all of them. Each of the two configurations has "
    f"{LEAST_RUNS} or more independent repeats, all of which ended ok, without the flags {', '.join(DOUBTFUL)}. Both "
    "ran in one allocation or at overlapping times. Options that two stages share are equal, and all others are as in "
    "their preset. Rule for a claim of another source: a model of a billion parameters or more ran on several nodes "
    "with GPUs, with as many such repeats. A claim about a slow network also needs the same two configurations "
    "compared on a faster network. Verdicts are corrected for the number of comparisons. A difference below "
    f"{100 * INTEREST:g} % decides nothing against a claim, and equality decides nothing at all. A configuration that "
    "ran out of memory is represented by its fastest micro-batch that fits. If none fits, the other configuration "
    "counts as faster. All other runs are analogues and test nothing. The GPUs and node counts of the study are not "
    f"known here, and need not be the same. {VERDICTS}"
)

_XXL = "mt5_xxl"
_NOTHING_TO_COMPARE = {
    True: "the runs have neither two node counts nor two ZeRO stages on several nodes",
    False: "no two layouts on several nodes differ only in the setting that the claim is about",
}
_BELOW: Counter[Effect] = Counter([EQUAL, *SMALL.values()])
"""Effects that are smaller than the smallest relevant difference."""


class Entry(NamedTuple):
    """The verdict on one published claim (`claim` is its id) on one machine, with the reason `why`. `measured`
    describes the comparisons for the claim. `machine` is empty if there are no such comparisons."""

    claim: str
    text: str
    source: str
    machine: str
    measured: str
    verdict: Verdict
    why: str


def judge(results: Results) -> list[Entry]:
    """Return the verdict on each published claim, one for each machine on which configurations were compared for the
    claim."""
    found = find_findings(results)
    testable = {claim.id: claim for claims in CLAIMS.values() for claim in claims}
    entries: list[Entry] = []
    for row in read_published("claims").rows:
        head = (row["id"], row["claim"], row["source"])
        if row["kind"] == "setting":
            why = "the claim describes the settings of the study and states nothing that could be measured"
            entries.append(Entry(*head, "", describe_coverage(row["id"], results), "not testable here", why))
        else:
            entries += _build_entries(head, testable.get(row["id"]), found)
    return entries


def _build_entries(head: tuple[str, str, str], claim: Claim | None, found: Sequence[ClaimFinding]) -> Iterator[Entry]:
    machines = group_by((finding for finding in found if finding.claim is claim), lambda finding: finding.machine)
    if not machines:
        yield Entry(*head, "", "", "not testable here", _NOTHING_TO_COMPARE[claim is None or claim.source == STUDY])
    for machine, of_machine in machines.items():
        measured = "; ".join(f"{finding.model}: {_format_counts(finding.counts)}" for finding in of_machine)
        yield Entry(*head, machine, measured, *decide(of_machine))


def decide(found: Sequence[ClaimFinding]) -> tuple[Verdict, str]:
    """Return the verdict on a claim on one machine, and the reason. `found` are the findings for the claim on that
    machine, one per model. Findings that do not meet the rule for testing the claim do not affect the verdict, but the
    reason lists them."""
    short = {finding.model: list_obstacles(finding) for finding in found}
    tests = [finding for finding in found if not short[finding.model]]
    if not tests:
        analogue = "; ".join(f"{finding.model}: {finding.verdict}" for finding in found)
        return "not testable here", f"{_join_reasons(short)} (as an analogue: {analogue})"
    claim = tests[0].claim
    comparisons = [comparison for finding in tests for comparison in list_tests(finding)]
    effects = name_effects(claim, [comparison.tested for comparison in comparisons if comparison.tested])
    # failed configurations have no p-value to correct
    counts = Counter([*effects, *(comparison.effect for comparison in comparisons if not comparison.tested)])
    verdict = claim.judge(counts)
    why = f"{', '.join(finding.model for finding in tests)}: {_format_counts(counts)}"
    if verdict == "cannot be told" and counts & _BELOW:
        why += f"; differences below {100 * INTEREST:g} % do not decide the claim"
    why += "; only the effect was tested, not its cause" if claim.id == "C1" and verdict != "cannot be told" else ""
    if left := Counter(" and ".join(reasons) for finding in tests for reasons in list_rejected(finding)):
        why += f"; excluded comparisons: {', '.join(f'{count} because {reason}' for reason, count in left.items())}"
    analogues = {model: reasons for model, reasons in short.items() if reasons}
    return verdict, why + (f"; excluded as analogues: {_join_reasons(analogues)}" if analogues else "")


def _format_counts(counts: Counter[Effect]) -> str:
    counts_text = ", ".join(f"{counts[effect]} {effect}" for effect in get_args(Effect) if counts[effect])
    return f"{counts_text} ({format_count(counts.total(), 'comparison')})" if counts_text else "no comparison"


def _join_reasons(short: Mapping[str, list[str]]) -> str:
    return "; ".join(dict.fromkeys(why for reasons in short.values() for why in reasons))


# ---------------------------------------- rule for testing a claim


def list_tests(finding: ClaimFinding) -> list[ClaimComparison]:
    """Return the comparisons that test the claim, including comparisons with too few repeats."""
    return [comparison for comparison in finding.comparisons if not any(_list_rejections(finding, comparison))]


def list_rejected(finding: ClaimFinding) -> list[list[str]]:
    """Return, for each comparison that does not test the claim, all reasons why it does not."""
    found = (list(_list_rejections(finding, comparison)) for comparison in finding.comparisons)
    return [reasons for reasons in found if reasons]


def list_obstacles(finding: ClaimFinding) -> list[str]:
    """Return the reasons why a finding (all comparisons for a claim with one model on one machine) does not test its
    claim; empty if it does."""
    if not finding.comparisons:
        return ["no two measured configurations differ only in the setting that the claim is about"]
    obstacles, tests = list(_list_model_obstacles(finding)), list_tests(finding)
    if not tests:
        return [*obstacles, *dict.fromkeys(itertools.chain(*list_rejected(finding)))]
    nodes = {row["nodes"] for comparison in tests for row in (comparison.before, comparison.after)}
    if len(nodes) < 2 and finding.claim.source == STUDY:
        obstacles.append("only one node count was measured")
    if not any(comparison.tested is not None and comparison.tested.decides for comparison in tests):
        obstacles.append(f"fewer than {LEAST_RUNS} independent repeats of each configuration")
    return obstacles


def find_studied_model(parameters: int | None) -> str | None:
    """Return the name of the published mT5 model with exactly this number of parameters. None if there is no such
    model, or if the number does not lie between SMALLEST and LARGEST."""
    rows = read_published("t5_shapes").rows
    shapes = {row["parameters"]: row["model"] for row in rows if row["model"].startswith("mt5_")}
    return shapes.get(str(parameters)) if SMALLEST <= (parameters or 0) <= LARGEST else None


def _format_parameters(parameters: int | None) -> str:
    return f"{format_significant(parameters / 1e6, 3)}M parameters" if parameters else "unknown number of parameters"


def _list_model_obstacles(finding: ClaimFinding) -> Iterator[str]:
    """Yield reasons why a finding does not test its claim, such as "the runs were not made on GPUs". Each reason is a
    condition of the claim's publication that the model or the device does not meet. A finding holds all comparisons for
    a claim with one model on one machine."""
    numbers = [row for one in finding.comparisons for row in (one.before, one.after) if row["n"]]
    counts = {row["parameters"] for row in numbers}  # models of one name may have different shapes
    if finding.claim.source == STUDY:
        model = find_studied_model(counts.pop()) if len(counts) == 1 else None
        if model is None:
            size_text = _format_parameters(numbers[0]["parameters"]) if numbers else "no run ended ok"
            yield f"{finding.model} ({size_text}) is no mT5 of 580M to 13B parameters"
        elif finding.claim.id == "C3" and model != _XXL:
            yield f"{finding.model} is not mT5-XXL"
    elif (least := min((count or 0 for count in counts), default=0)) < LARGE:
        yield f"{finding.model} ({_format_parameters(least)}) has fewer than a billion parameters"
    if any(row.get("adapter", "none") != "none" for row in numbers):
        yield f"only some parameters of {finding.model} were trained"
    on_gpus = all(row["peak_reserved_bytes"] is not None for row in numbers)  # recorded on every GPU, never on a CPU
    if not on_gpus or (not numbers and finding.claim.source != STUDY):
        yield "the runs were not made on GPUs"


def _list_rejections(finding: ClaimFinding, comparison: ClaimComparison) -> Iterator[str]:
    """Yield the reasons why a comparison does not test its claim; none if it tests the claim."""
    before, after = comparison.before, comparison.after
    if finding.claim.id == "C1" and before["global_batch"] != after["global_batch"]:
        yield "the work per step grew with the nodes, so more steps per second could not be expected"
    if not comparison.as_preset and finding.claim.source == STUDY:
        yield "an option that only one of the two stages has differs from its preset"
    if comparison.effect == "unknown" and any(not row["n"] for row in (before, after)):
        outcomes = dict.fromkeys(row["outcome"] for row in (before, after) if not row["n"])
        yield f"a configuration has no measured value ({', '.join(outcomes)})"
    if finding.claim.of_slow_network and not comparison.is_slow_network:
        yield "the same two configurations were not compared on a faster network"
    # slow repeats may be those that failed, so the remaining ones would look too fast
    flags = {flag for row in (before, after) for flag in row["flags"].split()}
    if "mixed" in flags:
        yield "some repeats of a configuration failed"
    yield from (f"a configuration has the flag {flag}" for flag in DOUBTFUL if flag in flags)
    if comparison.tested and (apart := _explain_times_apart(*comparison.find_starts())):
        yield apart


def _explain_times_apart(before: Starts, after: Starts) -> str:
    """Return a reason to doubt a comparison if its two configurations may have been measured at different times.

    This is the case if all runs of one configuration started before all runs of the other, or if a start time is
    unknown. Return an empty string if the configurations shared an allocation, or if their time ranges overlap.
    """
    if {one.allocation for one in before} & {one.allocation for one in after}:
        return ""
    times = [[one.started_at for one in side] for side in (before, after)]
    if not all(times) or not all(all(side) for side in times):
        return "the start time of a configuration is unknown"
    (first, last), (begin, end) = ((min(side), max(side)) for side in times)
    return "" if first <= end and begin <= last else "one configuration ran before the other"


_SETTINGS: Mapping[str, Mapping[str, Callable[[RunSpec], Any]]] = {
    "C5": {
        "micro-batch": attrgetter("batch.micro"), "samples per step": attrgetter("global_batch"),
        "learning rate": attrgetter("optimizer.lr"), "precision": attrgetter("precision"),
    },
    "C6": {"data": attrgetter("data.name"), "loader workers": attrgetter("data.workers")},
}  # fmt: skip
"""Settings that claims mention, by claim, each with the function that reads its value from a spec."""


def describe_coverage(claim: str, results: Results) -> str:
    """Return a text with the settings that a claim mentions, each with its values in the measured runs, such as
    "precision bf16, fp32". `claim` is the id of the claim; the text is empty for an unknown claim."""
    measured = [row for row in list_rows(results.table) if row["evidence"] == "measured"]
    if claim == "C4":
        sizes: dict[str, int | None] = {row["model"]: row["parameters"] for row in measured}
        within = [name for name, count in sizes.items() if find_studied_model(count)]
        models = ", ".join(f"{name} ({_format_parameters(count)})" for name, count in sizes.items())
        return f"{models or 'no model'}; mT5 models from 580M to 13B among them: {', '.join(within) or 'none'}"
    specs = [results.specs[row["config_id"]] for row in measured]
    values = {name: sorted(set(map(of, specs))) for name, of in _SETTINGS.get(claim, {}).items()}
    return "; ".join(f"{name} {', '.join(map(str, found)) or 'none'}" for name, found in values.items())


# ---------------------------------------- output

HEAD = ("Claim", "Published statement", "Machine", "Measured", "Verdict", "Reason")


def cells(entry: Entry) -> tuple[str, ...]:
    """Return the table cells of a verdict, one for each heading in HEAD."""
    words = (entry.claim, entry.text, entry.machine, entry.measured, entry.verdict, entry.why)
    return tuple(word or MISSING for word in words)


def to_markdown(entries: Sequence[Entry]) -> str:
    """Return Markdown: the rule for testing a claim, then a table of the verdicts."""
    return f"{TEXT}\n\n{format_markdown_table(HEAD, [cells(entry) for entry in entries], [False] * len(HEAD))}"


def to_csv(entries: Sequence[Entry]) -> str:
    """Return the verdicts as CSV with a header; cells that do not apply are empty."""
    frame = pd.DataFrame(entries, columns=list(Entry._fields), dtype="string")
    return frame.to_csv(index=False, lineterminator="\n")


def to_json(entries: Sequence[Entry]) -> str:
    """Return the verdicts as a JSON list of objects."""
    return json.dumps([entry._asdict() for entry in entries], indent=1, ensure_ascii=False) + "\n"
