"""What `zeroscale advise` is asked: plain words beside Hydra's overrides, and which of those span the search."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

from bench.config import compose
from bench.core.errors import UserError, suggest_nearest
from bench.core.files import list_engine_presets
from bench.core.spec import RunSpec
from bench.predict.advice import AdviceQuestion, Best
from bench.predict.advice.candidates import NODES, Axes, LayoutAxes
from bench.predict.scaling_laws import find_law
from bench.predict.workload import USUAL, Software, find_software

_HOURS = {"h": 1.0, "d": 24.0, "w": 168.0, "": 1.0}
_LAYOUTS = ("parallel.tensor", "parallel.pipeline", "parallel.stages_per_rank")
_AXES = ("engine", "nodes", "batch.micro", "batch.accumulation", "activation_checkpointing", *_LAYOUTS)
"""Overrides that may be lists, and that are searched where they are not given."""


class TrainingWords(NamedTuple):
    """What is said of a whole training, which only the spec and the machine make hours of. None: not said."""

    samples: float | None = None
    epochs: float | None = None  # how often the tokens or samples are gone through
    loss: float | None = None  # to reach
    law: str | None = None
    budget: float | None = None  # in the currency of the price
    storage: float | None = None  # bytes per second that a checkpoint is written with, by all nodes together
    node_mtbf: float | None = None  # seconds
    restart: float | None = None  # seconds


class AdviceQuery(NamedTuple):
    """A question, taken apart."""

    question: AdviceQuestion
    price: float | None  # per device and hour
    axes: Axes
    engines: tuple[str, ...]
    chosen: bool  # whether the engines were named, so that one that cannot be is a mistake
    overrides: list[tuple[str, Any]]  # what all points share
    texts: tuple[str, ...]  # the same, as they were written
    training: TrainingWords = TrainingWords()
    software: Software = USUAL


def parse_query(texts: Sequence[str]) -> AdviceQuery:
    """Return what the command line asks; UserError for the first thing that is wrong."""
    words = _parse_words([text for text in texts if text.partition("=")[0] in _WORDS])
    parsed = compose.parse_overrides([text for text in texts if text.partition("=")[0] not in _WORDS])
    _check_keys([key for key, _ in parsed])
    lists = {key: values for key, values in parsed if key in _AXES}
    shared = _require_single([(key, values) for key, values in parsed if key not in _AXES])
    training = TrainingWords(**{name: words.get(name) for name in TrainingWords._fields})
    question = AdviceQuestion(words.get("tokens"), words.get("deadline"), words.get("node_hours"), words.get("best"))
    _check_length(words)
    exact = dict(shared).pop("batch.global", None)
    axes = Axes(
        nodes=_parse_counts("nodes", lists) or NODES,
        checkpointing=tuple(_check_flag(value) for value in lists.get("activation_checkpointing", (False, True))),
        micro=_parse_counts("batch.micro", lists),
        accumulation=_parse_counts("batch.accumulation", lists),
        global_batch=None if exact is None else _check_count("batch.global", exact),
        max_global_batch=words.get("max_global_batch"),
        layouts=LayoutAxes(*(_parse_counts(key, lists) for key in _LAYOUTS)),
    )
    engines = tuple(map(str, lists.get("engine", list_engine_presets())))
    shared = [(key, value) for key, value in shared if key != "batch.global"]
    fixed = tuple(text for text in texts if text.partition("=")[0] in dict(shared))
    shared += [(key, lists[key][0]) for key in _LAYOUTS if key in lists]  # what else is composed may depend on them
    software = words.get("software", USUAL)
    return AdviceQuery(
        question, words.get("price"), axes, engines, "engine" in lists, shared, fixed, training, software
    )


_LENGTHS = ("tokens", "samples", "loss")
_OF_A_LENGTH = ("deadline", "node_hours", "budget", "best", "storage")


def _check_length(words: dict[str, Any]) -> None:
    """Raise UserError where the training has two lengths, or none and something is said of it."""
    given = [word for word in _LENGTHS if word in words]
    if len(given) > 1:
        raise UserError(" ".join(given), "each says how much is to be trained", "choose one")
    for word in _OF_A_LENGTH:
        if word in words and not given:
            raise UserError(word, "a limit for nothing in particular", "say tokens=1e12 as well")
    if "epochs" in words and not {"tokens", "samples"} & words.keys():
        raise UserError("epochs", "of how much data is not said", "say samples=1e6, of one epoch, as well")
    for word, needed in (("law", "loss"), ("node_mtbf", "storage"), ("restart", "storage")):
        if word in words and needed not in words:
            raise UserError(word, f"has no meaning without {needed}", f"say {needed}={_WORDS[needed].example} as well")


def _parse_amount(word: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{word}={text}", "not a number above 0", f"write for example {word}={_WORDS[word].example}")
    return number


def _parse_samples(word: str, text: str) -> int:
    number = _parse_amount(word, text)
    if number != int(number):
        raise UserError(f"{word}={text}", "not a whole number of samples", f"write for example {word}=2048")
    return int(number)


def _parse_seconds(word: str, text: str) -> float:
    found = re.fullmatch(r"(.+?)([smhd])", text)
    if found is None:
        raise UserError(f"{word}={text}", "no time with its unit", "write for example 90s, 10m, 12h or 300d")
    return _parse_amount(word, found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def _parse_best(word: str, text: str) -> str:
    if text not in get_args(Best):
        raise UserError(f"{word}={text}", "neither shortest nor cheapest", "write best=shortest or leave it out")
    return text


def _parse_law(word: str, text: str) -> str:
    find_law(text)
    return text


def _parse_software(word: str, text: str) -> Software:
    return find_software(text)


def _parse_hours(word: str, text: str) -> float:
    found = re.fullmatch(r"(.+?)([hdw]?)", text)
    if found is None:
        raise UserError(f"{word}={text}", "no time", "write hours, or for example 12h, 30d or 6w")
    return _parse_amount(word, found[1]) * _HOURS[found[2]]


class _PlainWord(NamedTuple):
    read: Callable[[str, str], Any]
    example: str
    help: str


_WORDS = {
    "tokens": _PlainWord(_parse_amount, "1e12", "to train on: of all kinds, padding included"),
    "samples": _PlainWord(_parse_amount, "1e9", "to train on, in place of tokens"),
    "epochs": _PlainWord(_parse_amount, "3", "how often those tokens or samples are gone through"),
    "loss": _PlainWord(_parse_amount, "2.8", "to reach, in nats per token, in place of tokens; by a scaling law"),
    "law": _PlainWord(_parse_law, "kaplan", "the scaling law: kaplan, chinchilla, chinchilla_corrected"),
    "best": _PlainWord(_parse_best, "shortest", "what the best is, whatever the limits: shortest or cheapest"),
    "deadline": _PlainWord(_parse_hours, "30d", "the training may take: hours, or 12h, 30d, 6w"),
    "node_hours": _PlainWord(_parse_amount, "5000", "the training may cost, in node-hours"),
    "price": _PlainWord(_parse_amount, "2.5", "of a device and hour, in your currency"),
    "budget": _PlainWord(_parse_amount, "50000", "the training may cost, in the currency of the price"),
    "storage": _PlainWord(_parse_amount, "2e9", "bytes per second a checkpoint is written with: counts failures"),
    "node_mtbf": _PlainWord(_parse_seconds, "264d", "mean time between failures of a node: 12h, 264d"),
    "restart": _PlainWord(_parse_seconds, "10m", "from a failure to the first step after it: 90s, 10m, 1h"),
    "software": _PlainWord(_parse_software, "fused", "class of what trains: eager, usual or fused; narrows times"),
    "max_global_batch": _PlainWord(_parse_samples, "2048", "samples per optimizer step, over all devices, at most"),
}


def format_help() -> str:
    """Return what the plain words mean, a line each."""
    return "\n".join(f"  {f'{name}={word.example}':<24}{word.help}" for name, word in _WORDS.items())


def _parse_words(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise UserError(text, f"{name} is given twice", "choose one")
        found[name] = _WORDS[name].read(name, value)
    return found


def _check_keys(keys: list[str]) -> None:
    """Raise UserError for a key that begins with no override and is no plain word, with the nearest of both."""
    known = {field.alias or name for name, field in RunSpec.model_fields.items()} | set(compose.GROUPS)
    for key in keys:
        if key == "study":
            raise UserError("study", "advice is for one question, and spans its own points", "leave it out")
        if key == "batch":
            raise UserError("batch", "its parts are searched", "give batch.micro, batch.accumulation or batch.global")
        if key.split(".")[0] not in known:
            raise UserError(key, "no such key", suggest_nearest(key, known | set(_WORDS)))


def _require_single(parsed: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    for key, values in parsed:
        if len(values) != 1:
            listed = ",".join(map(str, values))
            raise UserError(f"{key}={listed}", "one question, one value", f"lists may have {', '.join(_AXES)}")
    return [(key, values[0]) for key, values in parsed]


def _parse_counts(key: str, lists: dict[str, list[Any]]) -> tuple[int, ...] | None:
    values = lists.get(key)
    return tuple(sorted({_check_count(key, value) for value in values})) if values else None


def _check_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key}={value}", "not a whole number above 0", "leave it out to have it chosen")
    return value


def _check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"activation_checkpointing={value}", "neither true nor false", "leave it out to try both")
    return value
