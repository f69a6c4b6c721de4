"""Reading of samples with prompts and answers from JSON lines, and formatting of chats by a template."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from bench.core.errors import UserError, list_names, suggest_nearest
from bench.core.spec import Frozen

if TYPE_CHECKING:
    from bench.data.pipeline.corpus import Tokenizer

_OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED = frozenset(_OPENERS)
"""Suffixes of compressed files that `open_text` reads."""
_FIRST_BYTES = 1024
"""Number of bytes at the beginning of a file in which a zero byte reveals UTF-16."""
_SURROGATE = re.compile("[\udc80-\udcff]")
_TASK_SAMPLES, _TASK_LENGTHS, _TASK_LETTERS = 2000, (2, 4), "abcdefghij"
"""Number of samples of the generated task, its shortest and longest prompt, and the letters of prompts."""


class Fields(Frozen):
    """Names of the fields of a JSON line that hold the prompt and the answer, or a chat (`messages`)."""

    prompt: str = "prompt"
    answer: str = "answer"
    messages: str | None = None
    separator: str = "\n"


class Line(NamedTuple):
    """One line of a file, which contains one sample as a JSON object."""

    file: str
    number: int  # from 1
    content: dict[str, Any]

    def refuse(self, rule: str, remedy: str) -> UserError:
        """Return a UserError for this line, with the given rule and remedy."""
        return UserError(f"data.files={self.file}", f"line {self.number} {rule}", remedy)

    def refuse_missing(self, field: str, content: Mapping[str, Any]) -> UserError:
        """Return a UserError for a field that `content`, which is this line or a turn of its chat, does not have."""
        remedy = f"add it (existing fields: {list_names(content)})" if content else "add it"
        rule = f"has no field {field}" if content is self.content else f"has a turn of the chat without {field}"
        return self.refuse(rule, suggest_nearest(field, content, remedy))


class Segment(NamedTuple):
    """A piece of a sample's text, which is either part of an answer or not. Only tokens of answers have a loss."""

    text: str
    is_answer: bool


@contextmanager
def open_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> Iterator[TextIO]:
    """Return a context with an opened text file, which may be compressed. Raise UserError if the file cannot be opened,
    or if reading it fails later within the context. `errors` is the treatment of bytes that are not UTF-8, as in
    `open`."""
    try:
        opener = _OPENERS.get(path.suffix, open)
        with opener(path, "rb") as file:
            begin = file.read(_FIRST_BYTES)
        if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (errors == "strict" and b"\0" in begin):
            remedy = "convert the file, for example with iconv --from-code=UTF-16 --to-code=UTF-8"
            raise UserError(f"data.files={path}", "begins like UTF-16, and must be UTF-8", remedy)
        with opener(path, "rt", encoding=encoding, errors=errors) as file:
            yield file
    except UnicodeDecodeError as error:
        rule = f"line {_find_undecodable_line(path)} is not UTF-8"
        remedy = "convert the file, for example with iconv --from-code=LATIN1 --to-code=UTF-8"
        raise UserError(f"data.files={path}", rule, remedy) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # unreadable, or not compressed as its name
        reason = str(error).partition("\n")[0]
        raise UserError(f"data.files={path}", f"cannot be read ({reason})", "repair or replace it") from error


def _find_undecodable_line(path: Path) -> int:
    """Return the number of the first line, from 1, that is not UTF-8."""
    # With "surrogateescape", each byte that is not UTF-8 becomes a surrogate, which UTF-8 itself never contains.
    with open_text(path, errors="surrogateescape") as file:
        return next(number for number, text in enumerate(file, start=1) if _SURROGATE.search(text))


def read_lines(paths: Sequence[Path]) -> Iterator[Line]:
    """Yield each line that is not blank, file by file. Raise UserError for a file in which all lines are blank, and for
    a line that is not a JSON object."""
    for path in paths:
        found = False
        with open_text(path, "utf-8-sig") as file:  # without the byte order mark that some editors write
            for number, text in enumerate(file, start=1):
                if text.strip():
                    found = True
                    yield _parse(str(path), number, text)
        if not found:
            raise UserError(f"data.files={path}", "is empty", "give a file with one JSON object per line")


def _parse(file: str, number: int, text: str) -> Line:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise Line(file, number, {}).refuse(f"is not JSON ({reason})", "correct or remove the line") from error
    if not isinstance(content, dict):
        raise Line(file, number, {}).refuse("is not a JSON object", 'write {"prompt": "…", "answer": "…"}')
    return Line(file, number, content)


def generate_lines(fields: Fields) -> Iterator[Line]:
    """Yield the samples of a generated task, which is used if no files are given: each answer is its prompt in reverse
    order. `fields` has the names of the fields for prompt and answer. The samples do not depend on the run's seed."""
    import numpy as np

    random, seen, (least, most) = np.random.default_rng(0), set[str](), _TASK_LENGTHS
    while len(seen) < _TASK_SAMPLES:
        places = random.integers(len(_TASK_LETTERS), size=random.integers(least, most + 1))
        text = "".join(_TASK_LETTERS[place] for place in places)
        if text not in seen:
            seen.add(text)
            yield Line("", len(seen), {fields.prompt: text, fields.answer: text[::-1]})


# ---------------------------------------- prompts and chats


def list_segments(fields: Fields, words: Tokenizer, line: Line, *, joined: bool) -> list[Segment]:
    """Return the text of a sample in segments. If `joined` is true, prompt and answer form one sequence, as for a
    decoder-only model. If it is false, there are two segments: the prompt and the answer."""
    if fields.messages is None:
        question, answer = (_get_text(line, line.content, field) for field in (fields.prompt, fields.answer))
        if joined and not question + fields.separator:
            raise line.refuse(f"has an empty {fields.prompt}", "remove the line, or set data.separator")
        return [Segment(question + fields.separator * joined, is_answer=False), Segment(answer, is_answer=True)]
    turns = _list_turns(line, fields.messages)
    segments = _apply_template(words, line, turns) if words.format_chat else list(_join_turns(turns))
    if joined:
        return segments
    *before, last = segments
    return [Segment("".join(one.text for one in before), is_answer=False), last]


def _get_text(line: Line, content: dict[str, Any], field: str) -> str:
    text = content.get(field, ...)
    if isinstance(text, str):
        return text.encode(errors="replace").decode()  # JSON may contain lone surrogates, which UTF-8 cannot encode
    if text is not ...:
        raise line.refuse(f"has a field {field} of type {type(text).__name__}", "give text")
    if content is line.content and "messages" in content:
        raise line.refuse(f"has no field {field}", "set data.messages=messages for chats")
    raise line.refuse_missing(field, content)


def _list_turns(line: Line, field: str) -> list[dict[str, str]]:
    """Return the turns of a chat, up to the assistant's last answer."""
    turns = line.content.get(field, ...)
    if turns is ...:
        raise line.refuse_missing(field, line.content)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        remedy = 'write [{"role": "user", "content": "…"}, …]'
        raise line.refuse(f"has a field {field} that is not a list of turns", remedy)
    read = [{name: _get_text(line, turn, name) for name in ("role", "content")} for turn in turns]
    while read and read[-1]["role"] != "assistant":
        read.pop()
    if not read:
        raise line.refuse("has no turn of the assistant", "add an answer with role assistant, or remove the line")
    return read


def _join_turns(turns: Sequence[dict[str, str]]) -> Iterator[Segment]:
    """Yield the segments of a chat in a plain template: each turn is a line that begins with its role."""
    text = ""
    for turn in turns:
        if turn["role"] == "assistant":
            yield Segment(f"{text}assistant: ", is_answer=False)
            yield Segment(turn["content"], is_answer=True)
            text = "\n"
        else:
            text += f"{turn['role']}: {turn['content']}\n"


def _apply_template(words: Tokenizer, line: Line, turns: list[dict[str, str]]) -> list[Segment]:
    """Return the segments of a chat in the tokenizer's own template. Raise UserError if the template refuses the chat.
    Also raise UserError if the template writes earlier turns differently when later turns follow."""
    from jinja2 import TemplateError

    assert words.format_chat is not None
    segments, done = list[Segment](), ""
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        try:
            before, whole = words.format_chat(turns[:number], True), words.format_chat(turns[: number + 1], False)
        except TemplateError as error:
            reason = str(error).partition("\n")[0]
            raise line.refuse(f"does not fit the tokenizer's chat template ({reason})", "correct the line") from error
        if not (before.startswith(done) and whole.startswith(before)):
            rule = "its chat template changes earlier turns, so that the answers in a chat are not found"
            raise UserError(f"data.tokenizer={words.name}", rule, "remove its chat template, or give another tokenizer")
        segments.append(Segment(before[len(done) :], is_answer=False))
        segments.append(Segment(whole[len(before) :], is_answer=True))
        done = whole
    return segments
