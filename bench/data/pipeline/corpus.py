"""Text corpora: reading with Hugging Face `datasets`, tokenising, and dividing into training text and held-out text.

The tokens are stored in the cache of `datasets`, whose folder the environment variable HF_DATASETS_CACHE sets. The
cache has a file lock. One rank tokenises the corpus while the other ranks wait for the lock, and then all ranks map the
same file. If a file, an option or the tokenizer changes, the corpus is tokenised again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.core.errors import UserError, list_names, suggest_nearest
from bench.core.spec import Frozen, Positive
from bench.data import check_tokenizer
from bench.data.pipeline.json_lines import COMPRESSED, open_text, read_lines

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bench.data.pipeline.spans import Tokens

# ---------------------------------------- tokenizers

BYT5 = "byt5"
BYT5_VOCABULARY = 384  # as transformers' ByT5Tokenizer(): pad, EOS, UNK, 256 bytes and 125 sentinels
BYT5_SENTINELS = 125
_T5_SENTINELS = 100
_BYT5_FIRST_BYTE = 3
_SENTINEL = re.compile(r"▁?<extra_id_(\d+)>")  # in mT5's vocabulary, sentinels begin with the mark of a new word


class Tokenizer(NamedTuple):
    """A tokenizer: the properties and functions that are needed to make samples."""

    name: str
    vocabulary: int  # highest id + 1, sentinels included
    eos: int
    sentinels: Tokens  # ids of <extra_id_0>, <extra_id_1>, …; empty outside the T5 family
    encode: Callable[[Sequence[str]], list[Tokens]]  # adds no special tokens
    decode: Callable[[Sequence[int]], str]  # omits special tokens
    # Applies the tokenizer's own chat template to turns. If the flag is True, the text ends in the begin of an answer.
    format_chat: Callable[[list[dict[str, str]], bool], str] | None = None  # None: it has no template

    def with_sentinels(self) -> Tokenizer:
        """Return this tokenizer if it has sentinels (tokens that stand for hidden spans). Otherwise return a copy with
        100 additional sentinels, as many as T5 has. Their ids follow the ids of this tokenizer's vocabulary."""
        import numpy as np

        if len(self.sentinels):
            return self
        first, vocabulary = self.vocabulary, self.vocabulary + _T5_SENTINELS
        return self._replace(vocabulary=vocabulary, sentinels=np.arange(first, vocabulary, dtype=np.int32))


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer "byt5", a tokenizer from Hugging Face by its name, or a tokenizer in a local folder. Raise
    UserError if the tokenizer cannot be loaded."""
    import numpy as np

    if name == BYT5:
        # This arithmetic on UTF-8 bytes is 400 times faster than transformers' tokenizer, and does not import it.
        # "</s>" in a text is not treated as EOS. A test checks that both tokenizers give equal ids.
        first_sentinel = _BYT5_FIRST_BYTE + 256

        def encode_bytes(texts: Sequence[str]) -> list[Tokens]:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _BYT5_FIRST_BYTE for text in texts]

        def decode_bytes(ids: Sequence[int]) -> str:
            kept = (token for token in ids if _BYT5_FIRST_BYTE <= token < first_sentinel)
            return bytes(token - _BYT5_FIRST_BYTE for token in kept).decode(errors="ignore")

        sentinels = np.arange(first_sentinel, first_sentinel + BYT5_SENTINELS, dtype=np.int32)
        return Tokenizer(BYT5, BYT5_VOCABULARY, 1, sentinels, encode_bytes, decode_bytes)
    check_tokenizer(name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:  # unknown name, no network, or a folder without a tokenizer
        reason = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise UserError(f"data.tokenizer={name}", reason, "give a folder with a saved tokenizer, or byt5") from error
    ids = tokenizer.get_vocab()
    numbers = {int(match[1]): ids[token] for token in ids if (match := _SENTINEL.fullmatch(token))}
    if tokenizer.eos_token_id is None:
        remedy = 'set its `eos_token="…"` in AutoTokenizer.from_pretrained and save_pretrained it, or give another'
        raise UserError(f"data.tokenizer={name}", "has no EOS", remedy)

    def encode(texts: Sequence[str]) -> list[Tokens]:
        # verbose=False suppresses the warning that documents are longer than the model's maximum.
        rows = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(row, dtype=np.int32) for row in rows]

    def decode(row: Sequence[int]) -> str:
        return str(tokenizer.decode(row, skip_special_tokens=True))

    def format_chat(turns: list[dict[str, str]], begins_answer: bool) -> str:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=begins_answer))

    sentinels = np.array([numbers[n] for n in sorted(numbers) if 0 in numbers], dtype=np.int32)
    template = format_chat if getattr(tokenizer, "chat_template", None) else None
    return Tokenizer(name, max(ids.values()) + 1, tokenizer.eos_token_id, sentinels, encode, decode, template)


# ---------------------------------------- corpora

_BUILDERS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Names of the builders of `datasets` by file name suffix."""
_COMPRESSED = {*COMPRESSED, ".zst"}
_BATCH_CHARACTERS = 2**20
FIRST_BYTES, FIRST_DOCUMENTS = 4_000_000, 5_000
"""Maximum number of bytes and of documents that are read and checked before a run starts. The run itself reads and
checks the whole corpus."""
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_LAYOUT = 1  # part of the cache key: raise it when the output of `_list_documents` changes


class TextSelection(Frozen):
    """Selection of a text: its files or its Hugging Face data set, and limits on its size."""

    files: tuple[str, ...] = ()
    hub: str | None = None
    hub_config: str | None = None
    split: str = "train"
    field: str = "text"
    sample_by: Literal["document", "paragraph", "line"] = "document"
    max_bytes: Positive = 4_000_000
    max_documents: Positive | None = None


class CorpusSelection(TextSelection):
    """Selection of a text and a tokenizer, which together determine the tokens."""

    tokenizer: str = BYT5


class Corpus(NamedTuple):
    """A tokenised corpus: its documents in one array of tokens, each followed by EOS."""

    name: str
    documents: int
    bytes: int  # of the UTF-8 text
    sha256: str  # of the UTF-8 text: all documents joined without separators
    tokens: Tokens
    ends: NDArray[np.int64]  # (documents,): index in `tokens` after each document's EOS


def load(selection: CorpusSelection) -> Corpus:
    """Return the selected corpus, from the cache or newly tokenised. Raise UserError if it is unreadable."""
    import numpy as np

    request = _build_request(selection)
    table = load_table(_list_documents, request, {"ids": ["int32"], "bytes": "int64", "sha256": "string"})
    chunks = table.data.column("ids").chunks
    lengths = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks])
    tokens = np.concatenate([chunk.flatten().to_numpy() for chunk in chunks])
    return _build_corpus(selection, tokens, lengths, table[-1])


def _build_request(selection: CorpusSelection) -> dict[str, Any]:
    return {
        "selection": selection.model_dump(mode="json", include=set(CorpusSelection.model_fields)),
        "stamps": read_stamps([] if selection.hub else list_files(selection), selection.tokenizer),
        "layout": _LAYOUT,
    }


def _build_corpus(selection: CorpusSelection, tokens: Tokens, lengths: Any, last: Mapping[str, Any]) -> Corpus:
    """Return the corpus with the given tokens. `lengths` has the number of tokens of each document. `last` is the last
    row from `_list_documents`; its `bytes` and `sha256` are the size and the hash of the whole text."""
    import numpy as np

    ends = np.cumsum(lengths, dtype=np.int64)
    return Corpus(_format_name(selection), len(ends), last["bytes"], last["sha256"], tokens, ends)


def read_beginning(selection: CorpusSelection) -> tuple[Corpus | None, bool]:
    """Return two values: the first documents of a corpus from local files, and True if they are the whole corpus. At
    most FIRST_BYTES bytes and FIRST_DOCUMENTS documents are read. Tokens are bytes, as the tokenizer "byt5" makes them.
    Raise the same UserError as `load` for an unusable line.

    Some files can be read only by the library `datasets`, which is slow to import. For these files, return None and
    False.
    """
    import numpy as np

    if not all(map(_is_readable_here, list_files(selection))):
        return None, False
    documents = selection.max_documents or FIRST_DOCUMENTS + 1
    limits = {"max_bytes": min(selection.max_bytes, FIRST_BYTES), "max_documents": min(documents, FIRST_DOCUMENTS)}
    first = selection.model_copy(update={**limits, "tokenizer": BYT5})
    rows = list(_list_documents(_build_request(first)))
    ids = [row["ids"] for row in rows]
    text = _build_corpus(selection, np.concatenate(ids), [len(one) for one in ids], rows[-1])
    has_all_bytes = text.bytes < FIRST_BYTES or selection.max_bytes <= FIRST_BYTES
    return text, has_all_bytes and (len(rows) < FIRST_DOCUMENTS or documents <= FIRST_DOCUMENTS)


def load_table(
    list_rows: Callable[[dict[str, Any]], Iterator[dict[str, Any]]],
    request: dict[str, Any],
    columns: Mapping[str, str | list[str]],
) -> Any:
    """Return the rows of `list_rows(request)` as a data set of Hugging Face. If the cache has the rows of an equal
    request, `list_rows` is not called. `columns` has the type of each column; a list [type] means that each cell is a
    list of this type. Raise the UserError of `list_rows`."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError

    kinds = {name: [Value(kind[0])] if isinstance(kind, list) else Value(kind) for name, kind in columns.items()}
    try:
        # One mapping is passed, because `datasets` would split a list among shards.
        return Dataset.from_generator(list_rows, features=Features(kinds), gen_kwargs={"request": request})
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise


def _list_documents(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row for each document. `ids` are the document's token ids, EOS included. `bytes` and `sha256` are the
    size and the hash of all text from the first document to this document."""
    import numpy as np

    selection = CorpusSelection(**request["selection"])
    words = load_tokenizer(selection.tokenizer)
    total, digest = 0, hashlib.sha256()
    texts = _list_texts(selection)
    while batch := list(islice(texts, 64)):  # fast tokenizers need batches of texts to be fast
        for text, ids in zip(batch, words.encode(batch), strict=True):
            raw = text.encode()
            total += len(raw)
            digest.update(raw)
            yield {"ids": np.append(ids, np.int32(words.eos)), "bytes": total, "sha256": digest.hexdigest()}
    if not total:
        raise UserError(f"data corpus {_format_name(selection)}", "holds no text", "choose by data.files or data.hub")


def _list_texts(selection: CorpusSelection) -> Iterator[str]:
    """Yield the non-empty documents of a text, up to the limits `max_documents` and `max_bytes`. The last document is
    cut at `max_bytes`."""
    left = selection.max_bytes
    texts = filter(None, (_get_text(place, row, selection.field) for place, row in _list_rows(selection)))
    for text in islice(texts, selection.max_documents):
        raw = text.encode(errors="replace")[:left]  # JSON may contain lone surrogates, which UTF-8 cannot encode
        left -= len(raw)
        if kept := raw.decode(errors="ignore"):
            yield kept
        if not left:
            return


def _get_text(place: str, row: dict[str, Any], field: str) -> str | None:
    text = row.get(field, ...)
    if text is None or isinstance(text, str):
        return text
    if text is ...:
        raise UserError(f"data.field={field}", f"no such column{place}", suggest_nearest(field, row))
    remedy = f"choose a field with text: {list_names(name for name in row if isinstance(row[name], str)) or 'none'}"
    raise UserError(f"data.field={field}", f"holds {type(text).__name__}, not text{place}", remedy)


def _list_rows(selection: CorpusSelection) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row together with its file and line, as text for an error message. The text is empty if file and line
    are unknown. A row is read only when the caller asks for it."""
    paths = [] if selection.hub else list_files(selection)
    if not paths or not all(map(_is_readable_here, paths)):
        yield from (("", row) for row in _open_rows(selection, paths))
    elif _name_builder(paths[0]) == "json":
        for line in read_lines(paths):
            yield f" in line {line.number} of {line.file}", line.content
    else:
        for path in paths:
            yield from (("", {selection.field: text}) for text in _read_texts(path, selection))


def _is_readable_here(path: Path) -> bool:
    """Return True for text and JSON lines, which are read without `datasets`. Return False for Parquet, for zstd, and
    for a file that is one JSON array."""
    kind = _name_builder(path)
    if kind == "parquet" or path.suffix == ".zst":
        return False
    if kind == "text":
        return True
    with open_text(path, "utf-8-sig") as file:
        return not file.read(1024).lstrip().startswith("[")


def _read_texts(path: Path, selection: CorpusSelection) -> Iterator[str]:
    """Yield the documents, paragraphs or lines of a text file. Blank lines separate paragraphs."""
    # A few files of Python's standard library, which is read without `data.files`, have another encoding.
    with open_text(path, errors="strict" if selection.files else "replace") as file:
        if selection.sample_by == "document":
            yield file.read(selection.max_bytes)  # a character has at least one byte
        elif selection.sample_by == "line":
            yield from (line.removesuffix("\n") for line in file)
        else:
            rest = ""
            while batch := file.read(_BATCH_CHARACTERS):
                *whole, rest = (rest + batch).split("\n\n")
                yield from whole
            yield rest


def _open_rows(selection: CorpusSelection, paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Hugging Face data set, or of the local files `paths`, as `datasets` streams them."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    value, remedy = f"data.hub={selection.hub}", "correct the name or give data.files"
    names: tuple[str | None, ...] = (selection.hub, selection.hub_config)
    given: dict[str, Any] = {"split": selection.split}
    if not selection.hub:
        value, remedy = f"data.files={','.join(selection.files)}", "repair or replace the files"
        builder = _name_builder(paths[0])
        reading = {"sample_by": selection.sample_by} if builder == "text" else {}
        names, given = (builder,), {"data_files": {"train": list(map(str, paths))}, "split": "train", **reading}
    try:
        yield from load_dataset(*names, streaming=True, **given)
    except (OSError, ValueError, DatasetsError) as error:  # unknown data set or split, no network, or a damaged file
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(value, reason, remedy) from error


def list_files(selection: CorpusSelection) -> list[Path]:
    """Return the local files of a selection that names no data set from Hugging Face (`hub`). Raise UserError if a file
    is missing, or if the files have different formats.

    If the selection names no files either, return the first files of Python's standard library, up to `max_bytes`.
    Every machine has this text.
    """
    if not selection.files:
        return _list_standard_library(selection.max_bytes)
    paths = find_files(selection.files)
    builders = {_name_builder(path) for path in paths}
    if len(builders) > 1:
        formats = " and ".join(sorted(builders))
        raise UserError(f"data.files={','.join(selection.files)}", f"mixes {formats}", "give files of one format")
    return paths


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match any of the paths and globs. Raise UserError for a pattern without a file."""
    found = [_find_matches(pattern) for pattern in patterns]
    for pattern, paths in zip(patterns, found, strict=True):
        if not paths:
            raise UserError(f"data.files={pattern}", "no such file", "give a path or a glob that matches files")
    return list(chain.from_iterable(found))


def _find_matches(pattern: str) -> list[Path]:
    try:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(f"data.files={pattern}", "is a folder", f"name its files, such as {pattern}/*.jsonl")
        if path.exists():  # checked before globbing: a file name may contain glob characters
            return [path] if path.is_file() else []
        root = Path(path.anchor)
        return sorted(match for match in root.glob(str(path.relative_to(root))) if match.is_file())
    except (OSError, ValueError, RuntimeError, NotImplementedError):  # name too long, `a**`, or home of an unknown user
        return []


def _name_builder(path: Path) -> str:
    """Return the name of the `datasets` builder for the format of `path`. Raise UserError for an unknown format."""
    suffix = next((suffix for suffix in reversed(path.suffixes) if suffix not in _COMPRESSED), "")
    if suffix not in _BUILDERS:
        raise UserError(f"data.files={path}", "unknown format", f"give files named {', '.join(_BUILDERS)}")
    return _BUILDERS[suffix]


def _list_standard_library(max_bytes: int) -> list[Path]:
    import numpy as np

    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        # Exclude other packages, and files that differ between builds of one Python version.
        folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY and not name.startswith("config-")]
        modules = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        paths += [Path(folder, name) for name in modules]
    paths.sort(key=lambda path: path.relative_to(root).parts)
    sizes = np.cumsum([path.stat().st_size for path in paths])
    return paths[: int(np.searchsorted(sizes, max_bytes)) + 1]


def read_stamps(paths: Iterable[Path], tokenizer: str) -> list[tuple[str, int, int]]:
    """Return the path, the size in bytes and the modification time in nanoseconds of every file in `paths`. If
    `tokenizer` is a local folder, the files in this folder are included."""
    files = [*paths, *sorted(path for path in Path(tokenizer).glob("*") if path.is_file())]
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _format_name(selection: CorpusSelection) -> str:
    if selection.hub:
        return "/".join(filter(None, [selection.hub, selection.hub_config, selection.split]))
    return ",".join(selection.files) or f"Python {platform.python_version()} standard library"


# ---------------------------------------- held-out text


def divide(text: Corpus, share: float, seed: int) -> tuple[Corpus, Corpus]:
    """Return the training text and the held-out text of a corpus. Raise UserError unless two of its documents differ.

    Whole documents are held out, in a random order that depends only on `seed`, until they contain the share `share` of
    all tokens. Documents with equal text are either all held out or all used for training, so that a model is never
    trained on a held-out text.
    """
    import numpy as np

    begins = np.concatenate([[0], text.ends[:-1]])
    contents = [text.tokens[begin:end].tobytes() for begin, end in zip(begins, text.ends, strict=True)]
    numbers = {content: number for number, content in enumerate(dict.fromkeys(contents))}
    if len(numbers) < 2:
        rule = "has one document, and held-out text needs whole documents"
        remedy = "set data.sample_by=line or paragraph for text, or give several files or samples"
        if len(text.ends) > 1:
            rule, remedy = f"all {len(text.ends):,} documents (samples) are equal", "add different documents"
        raise UserError(f"data corpus {text.name}", rule, remedy)
    content = np.array([numbers[one] for one in contents])  # (documents,): equal numbers for equal documents
    lengths = text.ends - begins
    order = np.random.default_rng(seed).permutation(len(numbers))
    sums = np.cumsum(np.bincount(content, weights=lengths)[order])
    # At least one document is left for training.
    count = min(int(np.searchsorted(sums, share * sums[-1])) + 1, len(numbers) - 1)
    held = np.isin(content, order[:count])

    def take(chosen: NDArray[np.bool_]) -> Corpus:  # name, bytes and hash stay those of the whole corpus
        tokens, ends = text.tokens[np.repeat(chosen, lengths)], np.cumsum(lengths[chosen], dtype=np.int64)
        return text._replace(documents=len(ends), tokens=tokens, ends=ends)

    return take(~held), take(held)
