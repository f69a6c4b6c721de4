"""A corpus in two parts: one to learn from, and one that is only evaluated on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bench.data.pipeline.corpus import Corpus
from bench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class DividedText(NamedTuple):
    """Both parts as corpora of their own; together they are the whole one."""

    learned: Corpus
    held_out: Corpus


def divide(text: Corpus, share: float, seed: int) -> DividedText:
    """Hold whole documents out, drawn by `seed`, until they have the `share` of all tokens; UserError where there is
    only one. Documents of the same tokens stay together: none of them can be learned by heart for the other."""
    import numpy as np

    begins = np.concatenate([[0], text.ends[:-1]])
    contents = [text.tokens[begin:end].tobytes() for begin, end in zip(begins, text.ends, strict=True)]
    numbers = {content: number for number, content in enumerate(dict.fromkeys(contents))}
    if len(numbers) < 2:
        rule = "has one document, and whole ones are held out"
        raise UserError(f"data corpus {text.name}", rule, "set data.sample_by=paragraph, or give several files")
    content = np.array([numbers[one] for one in contents])
    lengths = text.ends - begins
    order = np.random.default_rng(seed).permutation(len(numbers))
    sums = np.cumsum(np.bincount(content, weights=lengths)[order])
    count = min(int(np.searchsorted(sums, share * sums[-1])) + 1, len(numbers) - 1)  # something is left to learn from
    held = np.isin(content, order[:count])
    return DividedText(_take(text, lengths, ~held), _take(text, lengths, held))


def _take(text: Corpus, lengths: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Corpus:
    """Return some documents of a text, in their order; its name, its bytes and its hash stay those of the whole."""
    import numpy as np

    tokens, ends = text.tokens[np.repeat(chosen, lengths)], np.cumsum(lengths[chosen], dtype=np.int64)
    return text._replace(documents=len(ends), tokens=tokens, ends=ends)
