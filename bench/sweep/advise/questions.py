"""Parse the arguments of `zeroscale advise`. Plain words such as `tokens=1e12` describe the training. Hydra overrides
define which points (configurations) are searched."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

from bench.config import compose
from bench.core.errors import UserError, suggest_nearest
from bench.core.files import find_group_files
from bench.core.spec import RunSpec
from bench.predict.advice import AdviceQuestion, Best
from bench.predict.advice.candidates import NODES, Axes, LayoutAxes
from bench.predict.scaling_laws import find_law
from bench.predict.workload import USUAL, Software, find_software
from bench.sweep.inputs import GivenOverrides, format_overrides

_HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0, "": 1.0}
_LAYOUTS = ("parallel.tensor", "parallel.pipeline", "parallel.stages_per_rank")
_AXES = ("engine", "adapter", "nodes", "batch.micro", "batch.accumulation", "activation_checkpointing", *_LAYOUTS)
"""Keys whose overrides may have several values to search. For a key without an override, the search chooses
the values."""


class TrainingWords(NamedTuple):
    """Arguments of `zeroscale advise` that describe the whole training, such as its length and budget. A value is None
    if the user did not give the argument."""

    samples: int | None = None
    epochs: float | None = None  # passes over the given tokens or samples
    loss: float | None = None  # loss to reach, in nats per token
    law: str | None = None  # name of a scaling law
    budget: float | None = None  # most that the training may cost, in the currency of the price
    storage: float | None = None  # bytes per second at which all nodes together write a checkpoint
    node_mtbf: float | None = None  # mean seconds between failures of one node
    restart: float | None = None  # seconds from a failure to the next step


class AdviceQuery(NamedTuple):
    """The parsed arguments of `zeroscale advise`: limits of the training, and the configurations to search."""

    question: AdviceQuestion
    price: float | None  # per device and hour
    axes: Axes
    engines: tuple[str, ...]
    chosen: bool  # whether the user named the engines; if so, an engine that cannot be used is an error
    overrides: list[tuple[str, Any]]  # key and value of the overrides that all points share
    texts: tuple[str, ...]  # the same overrides, as the user wrote them
    training: TrainingWords = TrainingWords()
    software: Software = USUAL
    nodes_given: bool = False  # whether the user chose the node counts
    adapters: tuple[str, ...] = ("none",)  # names of the kinds of training: none (full), lora, qlora


def parse_query(texts: Sequence[str]) -> AdviceQuery:
    """Return the parsed arguments of `zeroscale advise`. Raise UserError for the first mistake in them."""
    words = _parse_words([text for text in texts if text.partition("=")[0] in _WORDS])
    if "where" in words:
        raise UserError("where", "a comparison of places is not one answer", "call compare_places, or remove it")
    parsed = compose.parse_overrides([text for text in texts if text.partition("=")[0] not in _WORDS])
    _check_keys([key for key, _ in parsed])
    lists = {key: values for key, values in parsed if key in _AXES}
    others, remedy = [pair for pair in parsed if pair[0] not in _AXES], f"lists are allowed for {', '.join(_AXES)}"
    shared = compose.require_single(others, "must be one value", remedy)
    training = TrainingWords(**{name: words.get(name) for name in TrainingWords._fields})
    question = AdviceQuestion(words.get("tokens"), words.get("deadline"), words.get("node_hours"), words.get("best"))
    _check_length(words)
    exact = dict(shared).pop("batch.global", None)
    checkpointing = tuple(lists.get("activation_checkpointing", (False, True)))
    for value in checkpointing:
        if not isinstance(value, bool):
            raise UserError(f"activation_checkpointing={value}", "must be true or false", "remove it to try both")
    axes = Axes(
        nodes=_parse_counts("nodes", lists) or NODES,
        checkpointing=checkpointing,
        micro=_parse_counts("batch.micro", lists),
        accumulation=_parse_counts("batch.accumulation", lists),
        global_batch=None if exact is None else _check_count("batch.global", exact),
        max_global_batch=words.get("max_global_batch"),
        layouts=LayoutAxes(*(_parse_counts(key, lists) for key in _LAYOUTS)),
    )
    engines = tuple(map(str, lists.get("engine", find_group_files("engine"))))
    shared = [(key, value) for key, value in shared if key != "batch.global"]
    fixed = tuple(text for text in texts if text.partition("=")[0] in dict(shared))
    first = {key: lists[key][0] for key in _LAYOUTS if key in lists}
    if first:  # other keys may depend on the layout, which needs enough nodes
        enough = int(first.get("parallel.tensor", 1)) * int(first.get("parallel.pipeline", 1))
        shared += [("nodes", enough), *first.items()]
    software = words.get("software", USUAL)
    return AdviceQuery(
        question, words.get("price"), axes, engines, "engine" in lists, shared, fixed, training, software,
        "nodes" in lists, tuple(map(str, lists.get("adapter", ("none",)))),
    )  # fmt: skip


_LENGTHS = ("tokens", "samples", "loss")
_OF_A_LENGTH = ("deadline", "node_hours", "budget", "best", "storage")


def _check_length(words: dict[str, Any]) -> None:
    """Raise UserError if several arguments set the training's length, or if an argument needs another argument that is
    missing. For example, `law` needs `loss`."""
    given = [word for word in _LENGTHS if word in words]
    if len(given) > 1:
        raise UserError(" ".join(given), "each of them sets the length of the training", "choose one")
    for word in _OF_A_LENGTH:
        if word in words and not given:
            raise UserError(word, "the training has no length", "add tokens=1e12")
    if "epochs" in words and not {"tokens", "samples"} & words.keys():
        raise UserError("epochs", "the length of one epoch is missing", "add samples=1e6")
    for word, needed in (("law", "loss"), ("node_mtbf", "storage"), ("restart", "storage")):
        if word in words and needed not in words:
            raise UserError(word, f"has no meaning without {needed}", f"add {needed}={_WORDS[needed].example}")


def _parse_amount(word: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{word}={text}", "not a number above 0", f"set for example {word}={_WORDS[word].example}")
    return number


def _parse_whole(word: str, text: str) -> int:
    number = _parse_amount(word, text)
    if number != int(number):
        rule = f"not a whole number of {'tokens' if word == 'tokens' else 'samples'}"
        raise UserError(f"{word}={text}", rule, f"set for example {word}={_WORDS[word].example}")
    return int(number)


def _parse_seconds(word: str, text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
    return _parse_time(word, text, units, "not a time above 0 with its unit", "write for example 90s, 10m, 12h or 300d")


def _parse_best(word: str, text: str) -> str:
    if text not in get_args(Best):
        raise UserError(f"{word}={text}", "must be shortest or cheapest", "set best=shortest or remove it")
    return text


def _parse_hours(word: str, text: str) -> float:
    return _parse_time(word, text, _HOURS, "not a time above 0", "write hours, or for example 45m, 12h, 30d or 6w")


def _parse_time(word: str, text: str, units: dict[str, float], rule: str, remedy: str) -> float:
    """Return the time in `text`, a number with a unit such as `12h`. The user gave `text` as the value of the argument
    `word`. `units` maps each unit to its factor; the result is in the unit with the factor 1. If `text` is not of this
    form, raise UserError. The error message has two texts: the broken rule (`rule`), and how to correct the value
    (`remedy`)."""
    found = re.fullmatch(rf"(.+?)([{''.join(units)}]{'?' if '' in units else ''})", text)
    try:
        return _parse_amount(word, found[1] if found else "") * units[found[2] if found else ""]
    except (UserError, KeyError):
        raise UserError(f"{word}={text}", rule, remedy) from None


class _PlainWord(NamedTuple):
    """An argument that only `zeroscale advise` has, such as `tokens=1e12`. `read(name, text)` parses the value
    `text`."""

    read: Callable[[str, str], Any]
    example: str
    help: str


_WORDS = {
    "tokens": _PlainWord(_parse_whole, "1e12", "tokens to train on, of all kinds, padding included"),
    "samples": _PlainWord(_parse_whole, "1e9", "samples to train on, or packed sequences, in place of tokens"),
    "epochs": _PlainWord(_parse_amount, "3", "passes over the given tokens or samples"),
    "loss": _PlainWord(_parse_amount, "2.8", "loss to reach by a scaling law, in nats per token, in place of tokens"),
    "law": _PlainWord(
        lambda _, text: find_law(text) and text, "kaplan", "scaling law: kaplan, chinchilla, chinchilla_corrected"
    ),
    "best": _PlainWord(_parse_best, "shortest", "which choice is best, whatever the limits: shortest or cheapest"),
    "deadline": _PlainWord(_parse_hours, "30d", "longest time of the training: hours, or 45m, 12h, 30d, 6w"),
    "node_hours": _PlainWord(_parse_amount, "5000", "most node-hours of the training"),
    "price": _PlainWord(_parse_amount, "2.5", "price of a device per hour, in your currency"),
    "budget": _PlainWord(_parse_amount, "50000", "most that the training may cost, in the currency of the price"),
    "storage": _PlainWord(
        _parse_amount, "2e9", "bytes per second of checkpoint writes; with it, times include failures"
    ),
    "node_mtbf": _PlainWord(_parse_seconds, "264d", "mean time between failures of one node: 12h, 264d"),
    "restart": _PlainWord(_parse_seconds, "10m", "time from a failure to the next step: 90s, 10m, 1h"),
    "software": _PlainWord(
        lambda _, text: find_software(text),
        "fused",
        "how optimized the software is: eager, usual or fused; narrows the times",
    ),
    "max_global_batch": _PlainWord(_parse_whole, "2048", "most samples per optimizer step, over all devices"),
    "where": _PlainWord(
        lambda _, text: text, "own:h100:8:2.5,spot:g2-standard-12", "places to compare: own, rented or spot nodes"
    ),
}


def format_question(given: GivenOverrides) -> tuple[str, ...]:
    """Return the arguments of `zeroscale advise` for a question. `given` is the question as a text, a list or a
    mapping. Values of arguments that only this command has, such as `tokens=1e12`, are written without quotes. In a
    mapping, values of Hydra overrides, such as `engine=…`, are quoted if necessary."""
    return format_overrides(given, plain=_WORDS)


def list_words() -> dict[str, str]:
    """Return the help texts of the arguments that only `zeroscale advise` has, by the name of the argument, such as
    `tokens`."""
    return {name: word.help for name, word in _WORDS.items()}


def format_help() -> str:
    """Return the help text of the arguments that only `zeroscale advise` has, such as `tokens=1e12`. The text has one
    entry for each argument. Hydra overrides, such as `engine=…`, are not included."""
    words = {f"{name}={word.example}": word.help for name, word in _WORDS.items()}
    return "\n".join(
        f"  {word:<24}{help_}" if len(word) < 24 else f"  {word}\n{'':26}{help_}" for word, help_ in words.items()
    )


def _parse_words(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise UserError(text, f"{name} is given twice", "remove one of them")
        found[name] = _WORDS[name].read(name, value)
    return found


def _check_keys(keys: list[str]) -> None:
    """Raise UserError for an override that a question may not contain. For an unknown key, the error suggests the most
    similar known key."""
    known = {field.alias or name for name, field in RunSpec.model_fields.items()} | set(compose.GROUPS)
    for key in keys:
        if key == "study":
            raise UserError("study", "advice searches its own points", "remove it")
        if key == "batch":
            rule = "its parts are searched one by one"
            raise UserError("batch", rule, "set batch.micro, batch.accumulation or batch.global")
        if key.split(".")[0] not in known:
            raise UserError(key, "no such key", suggest_nearest(key, known | set(_WORDS)))


def _parse_counts(key: str, lists: dict[str, list[Any]]) -> tuple[int, ...] | None:
    values = lists.get(key)
    return tuple(sorted({_check_count(key, value) for value in values})) if values else None


def _check_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key}={value}", "not a whole number above 0", "remove it to search all")
    return value
