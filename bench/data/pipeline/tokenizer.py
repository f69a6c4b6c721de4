"""Tokenizers, reduced to what making samples needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bench.core.errors import UserError

if TYPE_CHECKING:
    from bench.data.pipeline.spans import Tokens

BYT5 = "byt5"
BYT5_VOCABULARY = 384  # pad, EOS, UNK, 256 bytes, 125 sentinels: transformers' ByT5Tokenizer()
BYT5_SENTINELS = 125
T5_SENTINELS = 100
_BYT5_FIRST_BYTE = 3
_SENTINEL = re.compile(r"▁?<extra_id_(\d+)>")  # mT5's vocabulary writes them with the word mark


class Tokenizer(NamedTuple):
    """A tokenizer as a value."""

    name: str
    vocabulary: int  # highest id + 1, sentinels included
    eos: int
    sentinels: Tokens  # ids of <extra_id_0>, <extra_id_1>, …; empty outside the T5 family
    encode: Callable[[Sequence[str]], list[Tokens]]  # no special token added

    def with_sentinels(self) -> Tokenizer:
        """Return the same with sentinels of its own behind its vocabulary, as T5 has them, if it has none."""
        import numpy as np

        if len(self.sentinels):
            return self
        first, vocabulary = self.vocabulary, self.vocabulary + T5_SENTINELS
        return self._replace(vocabulary=vocabulary, sentinels=np.arange(first, vocabulary, dtype=np.int32))


def load(name: str) -> Tokenizer:
    """Return the tokenizer: "byt5", a Hugging Face name or a local folder; raise UserError if it cannot be used."""
    return _build_byt5() if name == BYT5 else _load_hugging_face(name)


def _build_byt5() -> Tokenizer:
    """ByT5's tokenizer is arithmetic on UTF-8 bytes. Done here, it is 400 times faster than transformers' lists of
    characters, needs no import of theirs, and text that spells out "</s>" stays text; a test holds the two equal.
    """

    import numpy as np

    first_sentinel = _BYT5_FIRST_BYTE + 256
    return Tokenizer(
        name=BYT5,
        vocabulary=BYT5_VOCABULARY,
        eos=1,
        sentinels=np.arange(first_sentinel, first_sentinel + BYT5_SENTINELS, dtype=np.int32),
        encode=lambda texts: [
            np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _BYT5_FIRST_BYTE for text in texts
        ],
    )


def _load_hugging_face(name: str) -> Tokenizer:
    import numpy as np
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:  # unknown name, no network, not a tokenizer's folder
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"data.tokenizer={name}", reason, "give a local folder, or byt5") from error
    ids = tokenizer.get_vocab()
    sentinels = {int(match[1]): ids[token] for token in ids if (match := _SENTINEL.fullmatch(token))}
    if tokenizer.eos_token_id is None:
        remedy = 'set its `eos_token="…"` in AutoTokenizer.from_pretrained and save_pretrained it, or give another'
        raise UserError(f"data.tokenizer={name}", "has no EOS", remedy)

    def encode(texts: Sequence[str]) -> list[Tokens]:
        # verbose=False: whole documents are longer than the model's maximum, and that is no news
        rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.int32) for row in rows]

    return Tokenizer(
        name=name,
        vocabulary=max(ids.values()) + 1,
        eos=tokenizer.eos_token_id,
        sentinels=np.array([sentinels[n] for n in sorted(sentinels) if 0 in sentinels], dtype=np.int32),
        encode=encode,
    )
