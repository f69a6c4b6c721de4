"""Data sources, one file each. A data source defines these members:

- `Options`: a pydantic model without torch, with the keys of conf/data that a user may set.
- `check(options, spec)`: raises UserError for a spec that this source does not support.
- `micro_batches(spec, data_rank)`: returns an endless iterator of `MicroBatch` on the host, from torch's DataLoader.
- `describe(spec)`: returns facts for the record as plain values, such as the corpus hash and the tokenizer.
- `has_fixed_targets(spec)`: optional; returns True if every sample has the same number of target tokens.

A source for trainings of a fixed length also excludes part of its data from training, for evaluation
(`bench.core.plugins.HeldOutDataPlugin`). A source of prompts with answers can also measure the quality of a model's
answers (`PromptDataPlugin`).

Sample i of the stream of samples for all ranks depends only on (seed, i). A global batch therefore contains the same
samples for every engine, number of ranks and number of micro-steps. Ranks that share a model copy get the same
micro-batches.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.core import plugins
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.plugins import DataPlugin, HeldOutDataPlugin, PromptDataPlugin
from bench.core.spec import RunSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class MicroBatch(NamedTuple):
    """Input of one forward pass. `tensors` maps keyword arguments of the model to int64 tensors of shape (micro,
    sequence length)."""

    tensors: "dict[str, Tensor]"
    padding: dict[str, int]  # by kind: how many of the micro × sequence.<kind> tokens are padding


class Row(NamedTuple):
    """Tokens of one kind (such as decoder tokens) in a sample. A stream returns rows instead of plain arrays if some
    tokens have no loss, or if several samples are packed into one sequence. All arrays have the shape (tokens,)."""

    tokens: "NDArray[np.int32]"
    learned: "NDArray[np.bool_]"  # True for tokens with a loss
    places: "NDArray[np.int32]"  # position of each token in its own sample


class Prompts(NamedTuple):
    """Prompts of held-out samples on one data-parallel rank. The quality of a model is measured by comparing the
    model's answers to these prompts with the reference answers."""

    batches: "list[PromptBatch]"
    limit: int  # maximum number of tokens of an answer, EOS included; equal on all ranks
    eos: int
    decode: Callable[[Sequence[int]], str]


class PromptBatch(NamedTuple):
    """A micro-batch of prompts. `tensors` are the model's inputs without labels, each (micro, length). For a
    decoder-only model, padding after each prompt leaves room for the answer."""

    tensors: "dict[str, Tensor]"
    ends: "Tensor"  # (micro,): number of tokens of each prompt
    numbers: list[int]  # index of each sample among all held-out samples
    references: list[str]


def load(source: str) -> DataPlugin:
    """Return the data source with this name. Raise UserError if there is no such source."""
    return plugins.load(plugins.DATA, source)


def load_held_out(source: str) -> HeldOutDataPlugin:
    """Return the data source with this name. Raise UserError if there is no such source, or if it cannot exclude data
    from training for evaluation."""
    return plugins.load(plugins.HELD_OUT_DATA, source)


def can_hold_out(source: str) -> bool:
    """Return True if the data source can exclude part of its data from training, for evaluation."""
    return all(hasattr(load(source), member) for member in plugins.HELD_OUT_DATA.members)


def load_prompts(source: str) -> PromptDataPlugin:
    """Return the data source with this name. Raise UserError if there is no such source, or if its samples are not
    prompts with answers."""
    return plugins.load(plugins.PROMPT_DATA, source)


def has_prompts(source: str) -> bool:
    """Return True if the samples of the data source are prompts with answers."""
    return all(hasattr(load(source), member) for member in plugins.PROMPT_DATA.members)


def check_vocabulary(tokenizer: str, known: int, spec: RunSpec) -> None:
    """Raise UserError if the tokenizer has more tokens (`known`) than the model's vocabulary."""
    if (model := vocabulary(spec)) < known:
        rule = f"tokenizer {tokenizer} has {known} tokens"
        raise UserError(f"model.shape.vocab={model}", rule, "give the model a larger vocabulary")


def check_own_tokenizer(spec: RunSpec) -> None:
    """Raise UserError if a training would use bytes as tokens although its checkpoint, a local folder, has a tokenizer.
    Runs that only measure steps may use bytes.

    The pretrained weights were trained with the token ids of their own tokenizer, so a training on bytes would be
    worthless. A tokenizer of ByT5 is accepted, because its ids are those of bytes.
    """
    if spec.learning.tokens is None or spec.model.checkpoint is None:
        return
    folder = Path(spec.model.checkpoint)
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and '"ByT5Tokenizer' in settings.read_text(errors="replace"):
        return
    if any((folder / name).is_file() for name in _TOKENIZER_FILES[1:]):
        rule = f"the checkpoint {folder} has a tokenizer of its own"
        raise UserError("data.tokenizer=byt5", rule, f"set data.tokenizer={folder}")


def is_tokenizer_here(name: str) -> bool:
    """Return True if a tokenizer of Hugging Face is a local folder or in the local cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(name).is_dir():
        return True
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in _TOKENIZER_FILES)
    except HFValidationError:  # not a name that the Hub permits
        return False


def check_tokenizer(name: str) -> None:
    """Raise UserError if a tokenizer of Hugging Face is neither on this machine nor on the Hub. The Hub is asked only
    once, whereas transformers would repeat a failing request for almost a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    value, remedy = f"data.tokenizer={name}", "give a local folder, or data.tokenizer=byt5"
    if Path(name).is_dir() and not _may_hold_tokenizer(Path(name)):
        remedy = "save one with tokenizer.save_pretrained, give another folder, or data.tokenizer=byt5"
        raise UserError(value, "the folder has no files of a tokenizer", remedy)
    if is_tokenizer_here(name):
        return
    try:
        HfApi().model_info(name, timeout=_HUB_S)
    except HFValidationError as error:
        raise UserError(value, "neither a folder nor a name on the Hugging Face Hub", remedy) from error
    except HfHubHTTPError as error:  # other answers do not say that the tokenizer is missing
        if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
            rule = "neither a folder nor a model on the Hugging Face Hub that can be read with your token"
            raise UserError(value, rule, remedy) from error
    except Exception as error:  # errors of the network have many types
        why = re.split(r"\n|\. ", str(error).strip())[0] or type(error).__name__
        rule = f"neither a folder nor in the local cache, and the Hugging Face Hub does not answer ({why})"
        raise UserError(value, rule, f"{remedy}, or run `zeroscale prepare` where there is a network") from error


def _may_hold_tokenizer(folder: Path) -> bool:
    """Return True if a folder has a file whose name is usual for tokenizers, or if its configuration names a class of
    tokenizers. Some classes, such as ByT5Tokenizer, need no files."""
    if any(re.search(r"token|vocab|merges|bpe|\.model$|\.spm$", path.name) for path in folder.iterdir()):
        return True
    settings = folder / "config.json"
    return settings.is_file() and '"tokenizer_class"' in settings.read_text(errors="replace")


_TOKENIZER_FILES = "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json"
_HUB_S = 5.0  # longest time that a request to the Hub may take


def check_held_out(spec: RunSpec, found: int, unit: str) -> None:
    """Raise UserError if `found`, the number of held-out sequences or samples (`unit`), is below
    `learning.evaluation_samples`. Held-out samples must not repeat, because a repeated sample would count twice in the
    held-out loss. All data-parallel ranks evaluate the same number of whole micro-batches. The error therefore proposes
    a multiple of the micro-batch size times the number of data-parallel ranks."""
    if (wanted := spec.learning.evaluation_samples) > found:
        each = spec.batch.micro * spec.data_parallel
        rule, remedy = (
            f"the held-out data make {format_count(found, unit)}",
            "raise learning.held_out, or give more data",
        )
        if found < each:
            rule += f", and an evaluation needs at least {each}"
        else:
            remedy = f"set learning.evaluation_samples={found // each * each}, {remedy}"
        raise UserError(f"learning.evaluation_samples={wanted}", rule, remedy)


def check_once(spec: RunSpec, stamps: object, options: object, check: Callable[[], None]) -> None:
    """Call `check`, unless it has already succeeded in this process for the same data. Data are the same if `stamps`
    (path, size and modification time of each file), `options`, and the spec's data source, objective, sequence lengths
    and learning settings are equal. Configurations of a sweep often share their data."""
    learning = spec.learning.model_dump(mode="json")
    key = repr([stamps, options, spec.data.source, spec.objective, spec.sequence, learning])
    if key not in _CHECKED:
        check()
        _CHECKED.add(key)


_CHECKED = set[str]()
"""Keys of the data that `check_once` has accepted in this process."""


def check_stream(batches: Iterator[MicroBatch], spec: RunSpec) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a data source. Raise UserError if the first does not fit the objective and the model,
    or if the stream ends."""
    for number, batch in enumerate(batches):
        if number == 0:
            _check_batch(batch, spec)
        yield batch
    raise UserError(f"data={spec.data.name}", "its stream of micro-batches ended", "make the stream endless")


def _check_batch(batch: MicroBatch, spec: RunSpec) -> None:
    value, size = f"data={spec.data.name}", vocabulary(spec)
    for kind in plugins.load(plugins.OBJECTIVE, spec.objective).KINDS:
        shape = spec.batch.micro, spec.sequence[kind.name]
        for argument, filler in kind.arguments.items():
            if (tokens := batch.tensors.get(argument)) is None:
                rule = f"its micro-batches lack {argument}, an argument of objective={spec.objective}"
                raise UserError(value, rule, f"they have {', '.join(batch.tensors)}")
            if tuple(tokens.shape) != shape or str(tokens.dtype) != "torch.int64":
                rule = f"{argument} has shape {tuple(tokens.shape)} and type {tokens.dtype}"
                raise UserError(value, rule, f"give shape {shape} (samples, tokens) and type torch.int64")
            ids = tokens[tokens != filler]
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                rule = f"{argument} has token ids from {int(ids.min())} to {int(ids.max())}"
                raise UserError(
                    value, rule, f"give ids from 0 to {size - 1}, the vocabulary of model={spec.model.name}"
                )


def vocabulary(spec: RunSpec) -> int:
    """Return the vocabulary size of the model in `spec`."""
    family = plugins.load(plugins.FAMILY, spec.model.family)
    return family.vocabulary(family.Shape.model_validate(spec.model.shape))
