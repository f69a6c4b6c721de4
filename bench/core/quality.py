"""Measures of the quality of a model's answers, compared with reference answers.

Token F1 is that of SQuAD (arXiv 1606.05250, section 6.1): lower-case words without punctuation and articles.
"""

import importlib
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from bench.core.errors import UserError, suggest_nearest

Measure = Callable[[Sequence[str], Sequence[str]], Any]
"""Function that compares predicted answers with reference answers, given in the same order. It returns one number."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of predictions that equal their reference, except for white space at begin and end."""
    pairs = zip(predictions, references, strict=True)
    return sum(one.strip() == other.strip() for one, other in pairs) / len(predictions)


def compute_token_f1(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the mean F1 of the words of each prediction and its reference, as in SQuAD's evaluation script."""
    return sum(map(_compute_f1, predictions, references)) / len(predictions)


def _compute_f1(prediction: str, reference: str) -> float:
    found, wanted = _list_words(prediction), _list_words(reference)
    if not (found and wanted):  # as in the script of SQuAD 2.0, where an empty answer may be right
        return float(found == wanted)
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted))


def _list_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


MEASURES: dict[str, Measure] = {"exact_match": compute_exact_match, "token_f1": compute_token_f1}
"""Measures by name. Any other measure is a function of an importable module, `module:function`."""


def load(name: str) -> Measure:
    """Return the quality measure with this name: a function that compares predicted answers with reference answers.
    Raise UserError if there is no such measure, or if its module cannot be imported."""
    if name in MEASURES:
        return MEASURES[name]
    value, (path, colon, function) = f"learning.quality={name}", name.partition(":")
    if not colon:
        nearest, other = suggest_nearest(name, MEASURES), "name a function as module:function"
        remedy = f"{nearest} Otherwise {other}" if nearest.endswith("?") else f"{nearest}, or {other}"
        raise UserError(value, "no such measure", remedy)
    try:
        found: Measure = getattr(importlib.import_module(path), function)
    except Exception as error:  # a user's module may fail in any way
        remedy = "correct the module, or add its folder to PYTHONPATH"
        raise UserError(value, f"cannot be imported ({_describe(error)})", remedy) from error
    if not callable(found):
        remedy = "name a function with two arguments: lists of predictions and references"
        raise UserError(value, "is not a function", remedy)
    return found


def compute(name: str, predictions: Sequence[str], references: Sequence[str]) -> float:
    """Return the value of the measure with this name. Raise UserError if its function fails or returns no finite
    number."""
    measure, value = load(name), f"learning.quality={name}"
    try:
        found = measure(list(predictions), list(references))
    except Exception as error:  # a user's function may fail in any way
        raise UserError(value, f"the function failed ({_describe(error)})", "correct the function") from error
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(value, f"the function returned {str(found)[:80]!r}, not a finite number", "return a float")
    return number


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
