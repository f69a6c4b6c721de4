"""Several texts as one stream, each with its share of the samples: texts of `data=text`, all cut by the same rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import Field

from bench.data import MicroBatch, text
from bench.data.pipeline import interleaving, tokenizer
from bench.data.pipeline.corpus import TextSelection
from bench.data.text import PreparedText, SampleOptions
from bench.errors import UserError
from bench.spec import RunSpec


class MixedText(TextSelection):
    """One text of a mixture."""

    weight: float | None = Field(None, gt=0, allow_inf_nan=False)


class Options(SampleOptions):
    """Which texts, their shares, and what is made of them. Each field is explained in conf/data/mixture.yaml."""

    sources: dict[str, MixedText] = {}
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    tokenizer: str = tokenizer.BYT5


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError for texts that are not there or too many, and for what `data=text` refuses."""
    if not 1 <= len(options.sources) <= interleaving.CYCLE:
        rule = f"a mixture is of 1 to {interleaving.CYCLE} texts, by name"
        raise UserError(f"data.sources of {len(options.sources)}", rule, "data.sources='{NAME: {files: [PATH]}, …}'")
    weighted = [name for name, source in options.sources.items() if source.weight is not None]
    if weighted and len(weighted) < len(options.sources):
        without = next(name for name in options.sources if name not in weighted)
        rule = f"has no weight, and {weighted[0]} has one"
        raise UserError(f"data.sources.{without}", rule, "give all a weight, or none: then a text counts by its size")
    for name in options.sources:
        with _name_source(name):
            text.check(_select(options, name), spec)


def micro_batches(spec: RunSpec, data_rank: int) -> Iterator[MicroBatch]:
    """Return the endless micro-batches of a data-parallel rank; raise UserError if a text or the tokenizer cannot be
    used. Each text has epochs of its own: a small one with a large share is seen more often than the others."""
    from bench.data.pipeline import loader

    prepared = _prepare(spec)
    counts = _count_samples(spec, prepared)
    samples = tuple(one.samples for one in prepared.values())
    mixed = interleaving.Interleaving(samples, interleaving.order_evenly(counts), samples[0].eos)
    return loader.micro_batches(mixed, spec, data_rank)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts for the record: the tokenizer, and of each text its hash and its share of the samples."""
    prepared = _prepare(spec)
    counts = _count_samples(spec, prepared)
    return {
        "source": "mixture",
        "tokenizer": text.describe_tokenizer(next(iter(prepared.values()))),
        "sources": {
            name: {"share": int(count) / interleaving.CYCLE, **text.describe_corpus(one)}
            for (name, one), count in zip(prepared.items(), counts, strict=True)
        },
    }


def has_fixed_targets(spec: RunSpec) -> bool:
    """Whether every sample has the same number of target tokens; all texts are cut by the same rules."""
    return text.has_fixed_targets(spec)


def _prepare(spec: RunSpec) -> dict[str, PreparedText]:
    options = Options(**spec.data.options)
    prepared = {}
    for number, name in enumerate(options.sources):
        with _name_source(name):  # texts of one length would all be taken in the same order if they shared a seed
            prepared[name] = text.prepare(_select(options, name), spec, (spec.seed, number))
    return prepared


def _count_samples(spec: RunSpec, prepared: dict[str, PreparedText]) -> Any:
    """Return how many samples of a cycle each text gives: by its weight, else by its samples per epoch."""
    options = Options(**spec.data.options)
    sizes = {name: len(one.samples.pieces.bounds) for name, one in prepared.items()}
    weights = [source.weight or sizes[name] for name, source in options.sources.items()]
    return interleaving.round_shares(interleaving.compute_shares(weights, options.temperature))


def _select(options: Options, name: str) -> text.Options:
    """Return what `data=text` would be given for one text of the mixture."""
    common = options.model_dump(exclude={"sources", "temperature"})
    return text.Options(**options.sources[name].model_dump(exclude={"weight"}), **common)


@contextmanager
def _name_source(name: str) -> Iterator[None]:
    """Say of an error in a text's selection which text it is."""
    try:
        yield
    except UserError as error:
        key, dot, field = error.value.partition("=")[0].partition(".")
        if key != "data" or not dot or field not in TextSelection.model_fields:
            raise
        raise UserError(f"data.sources.{name}.{error.value.removeprefix('data.')}", error.rule, error.remedy) from error
