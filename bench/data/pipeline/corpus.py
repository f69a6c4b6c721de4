"""A text corpus, read through Hugging Face `datasets` and tokenised once.

The tokens lie in `datasets`' own cache (HF_DATASETS_CACHE moves it). Its file lock lets one process of all ranks do
the work while the others wait and then map the same file; a changed file, option or tokenizer makes a new entry.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.core.errors import UserError, suggest_nearest
from bench.core.spec import Frozen, Positive
from bench.data.pipeline import tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bench.data.pipeline.spans import Tokens

_BUILDERS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_LAYOUT = 1  # raise it when `_documents` yields something else: the cache does not see code


class TextSelection(Frozen):
    """Which text, and how much of it."""

    files: tuple[str, ...] = ()
    hub: str | None = None
    hub_config: str | None = None
    split: str = "train"
    field: str = "text"
    sample_by: Literal["document", "paragraph", "line"] = "document"
    max_bytes: Positive = 4_000_000
    max_documents: Positive | None = None


class CorpusSelection(TextSelection):
    """Which text, how much of it, and by which tokenizer: all that the tokens depend on."""

    tokenizer: str = tokenizer.BYT5


class Corpus(NamedTuple):
    """Documents as one stream of tokens, each document with its EOS."""

    name: str
    documents: int
    bytes: int  # of UTF-8 text
    sha256: str  # of that text, the documents joined without anything between them
    tokens: Tokens
    ends: NDArray[np.int64]  # where in `tokens` each document ends, its EOS included


def load(selection: CorpusSelection) -> Corpus:
    """Return the selected corpus, tokenised now or found in the cache; raise UserError if it cannot be read."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    columns = Features({"ids": [Value("int32")], "bytes": Value("int64"), "sha256": Value("string")})
    request = {
        "selection": selection.model_dump(mode="json", include=set(CorpusSelection.model_fields)),
        "stamps": _read_stamps(selection),
        "layout": _LAYOUT,
    }
    try:
        # a list as a keyword argument of its own would be taken for shards
        table = Dataset.from_generator(_list_documents, features=columns, gen_kwargs={"request": request})
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    return _build_corpus(_format_name(selection), table)


def _build_corpus(name: str, table: Any) -> Corpus:
    import numpy as np

    chunks = table.data.column("ids").chunks
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    return Corpus(
        name=name,
        documents=len(table),
        bytes=table[-1]["bytes"],
        sha256=table[-1]["sha256"],
        tokens=np.concatenate([chunk.flatten().to_numpy() for chunk in chunks]),
        ends=np.cumsum(lengths, dtype=np.int64),
    )


def _list_documents(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each document's ids and EOS, with the bytes and the hash of all text so far."""

    import numpy as np

    selection = CorpusSelection(**request["selection"])
    words = tokenizer.load(selection.tokenizer)
    total, digest = 0, hashlib.sha256()
    texts = _list_texts(selection)
    while batch := list(islice(texts, 64)):  # fast tokenizers are fast on batches
        for text, ids in zip(batch, words.encode(batch), strict=True):
            raw = text.encode()
            total += len(raw)
            digest.update(raw)
            yield {"ids": np.append(ids, np.int32(words.eos)), "bytes": total, "sha256": digest.hexdigest()}
    if not total:
        raise UserError(f"data corpus {_format_name(selection)}", "holds no text", "choose by data.files or data.hub")


def _list_texts(selection: CorpusSelection) -> Iterator[str]:
    """Yield the documents that are not empty, up to the selection's limits; the last one is cut at `max_bytes`."""
    left = selection.max_bytes
    texts = filter(None, (_get_text(row, selection.field) for row in _open_rows(selection)))
    for text in islice(texts, selection.max_documents):
        raw = text.encode(errors="replace")[:left]  # JSON may hold lone surrogates, which UTF-8 has not
        left -= len(raw)
        if kept := raw.decode(errors="ignore"):
            yield kept
        if not left:
            return


def _get_text(row: dict[str, Any], field: str) -> str | None:
    text = row.get(field, ...)
    if text is None or isinstance(text, str):
        return text
    rule = "no such column" if text is ... else f"holds {type(text).__name__}, not text"
    raise UserError(f"data.field={field}", rule, suggest_nearest(field, row))


def _open_rows(selection: CorpusSelection) -> Any:
    """Return the source's rows as a `datasets` stream: nothing is read or downloaded beyond what is taken."""
    from datasets import load_dataset

    if selection.hub:
        try:
            return load_dataset(selection.hub, selection.hub_config, split=selection.split, streaming=True)
        except (OSError, ValueError) as error:  # no such data set, configuration or split, or no network
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"data.hub={selection.hub}", reason, "mend the name or give data.files") from error
    paths = list_files(selection)
    builder = _name_builder(paths[0])
    reading = {"sample_by": selection.sample_by, "encoding_errors": "replace"} if builder == "text" else {}
    names = [str(path) for path in paths]
    return load_dataset(builder, data_files={"train": names}, split="train", streaming=True, **reading)


def list_files(selection: CorpusSelection) -> list[Path]:
    """Return the local files of a selection without `hub`, all of one format; raise UserError if one is missing."""
    if not selection.files:
        return _list_standard_library(selection.max_bytes)
    found = [_find_matches(pattern) for pattern in selection.files]
    for pattern, paths in zip(selection.files, found, strict=True):
        if not paths:
            raise UserError(f"data.files={pattern}", "no such file", "give a path or a glob that matches files")
    paths = list(chain.from_iterable(found))
    builders = {_name_builder(path) for path in paths}
    if len(builders) > 1:
        formats = " and ".join(sorted(builders))
        raise UserError(f"data.files={','.join(selection.files)}", f"mixes {formats}", "give files of one format")
    return paths


def _find_matches(pattern: str) -> list[Path]:
    try:
        path = Path(pattern).expanduser()
        if path.exists():  # a name may hold a glob's signs
            return [path] if path.is_file() else []
        root = Path(path.anchor)
        return sorted(match for match in root.glob(str(path.relative_to(root))) if match.is_file())
    except (OSError, ValueError, RuntimeError, NotImplementedError):  # a name too long, `a**`, the home of nobody
        return []


def _name_builder(path: Path) -> str:
    """Return the name of the `datasets` builder that reads the format of `path`."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in _BUILDERS:
        raise UserError(f"data.files={path}", "unknown format", f"give files named {', '.join(_BUILDERS)}")
    return _BUILDERS[suffix]


def _list_standard_library(max_bytes: int) -> list[Path]:
    """Return the first of Python's own sources that make up `max_bytes`: a text that every machine has."""

    import numpy as np

    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        # left out: what is no part of the library, and what differs from build to build of one version
        folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY and not name.startswith("config-")]
        modules = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        paths += [Path(folder, name) for name in modules]
    paths.sort(key=lambda path: path.relative_to(root).parts)
    sizes = np.cumsum([path.stat().st_size for path in paths])
    return paths[: int(np.searchsorted(sizes, max_bytes)) + 1]


def _read_stamps(selection: CorpusSelection) -> list[tuple[str, int, int]]:
    """Return path, bytes and time of change of all local files that the tokens are made of."""
    paths = [] if selection.hub else list_files(selection)
    folder = Path(selection.tokenizer)
    paths += sorted(path for path in folder.glob("*") if path.is_file())
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _format_name(selection: CorpusSelection) -> str:
    if selection.hub:
        return "/".join(filter(None, [selection.hub, selection.hub_config, selection.split]))
    return ",".join(selection.files) or f"Python {platform.python_version()} standard library"


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
