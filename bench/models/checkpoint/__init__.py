"""Checkpoints in transformers' format: a folder with config.json and safetensors, or a name on the Hugging Face Hub.

This file finds a checkpoint's files and reads their headers. It does not import torch. The module `tensors` reads and
writes the weights. This package is in bench/models, but is not a model family.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.core.errors import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's names
FILES = CONFIG, INDEX, "*.safetensors"
"""Names of the files that are fetched from the Hub."""
STORES_HEAD = "_stores_head"
"""Key that `describe` adds to the content of a config.json."""
_HEAD = "lm_head.weight"
_LENGTH_BYTES, _LONGEST_HEADER = 8, 100_000_000
"""Two numbers of the safetensors format. A file begins with a number of _LENGTH_BYTES bytes, which is the length of the
header. The library safetensors accepts headers of up to _LONGEST_HEADER bytes."""
_BLOCKS, _BLOCK_BYTES = 64, 65_536  # number and size of the blocks of a file that `compute_fingerprint` reads
_POINTER = b"version "
"""First 8 bytes of a pointer of Git LFS (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w./-]+)?")


def is_folder(checkpoint: str) -> bool:
    """Return True if a checkpoint is a local folder, and False if it is a name on the Hub."""
    return Path(checkpoint).is_dir()


def split_name(checkpoint: str) -> tuple[str, str | None]:
    """Return the name of a checkpoint on the Hub and its revision; the revision is None if none is given. For a local
    folder, return its path and None."""
    name, _, revision = checkpoint.partition("@")
    return (checkpoint, None) if is_folder(checkpoint) else (name, revision or None)


def find_folder(checkpoint: str, files: Sequence[str] = FILES) -> Path:
    """Return the folder of a checkpoint. If the checkpoint is a name on the Hub, first fetch those of its files that
    match the patterns `files` and are not in the local cache. Raise UserError if there is no such folder or name, or if
    the Hub cannot be reached.
    """
    if is_folder(checkpoint):
        return Path(checkpoint)
    if not _HUB_NAME.fullmatch(checkpoint):
        remedy = f"give a folder with {CONFIG} and {WEIGHTS}, or a name on the Hugging Face Hub"
        raise UserError(f"model.checkpoint={checkpoint}", "no such folder", remedy)
    return _fetch(checkpoint, tuple(files))


def fetch_once(checkpoint: str, is_first: bool, barrier: Callable[[], None]) -> Path:
    """Return the folder of a checkpoint. If files have to be fetched, the first rank of a node (`is_first`) fetches
    them for all ranks of the node. `barrier` waits for all ranks. All ranks must call this function."""
    if is_first:
        find_folder(checkpoint)
    barrier()
    return find_folder(checkpoint)


@functools.cache  # all configurations of a study read the same config.json
def _fetch(name: str, files: tuple[str, ...]) -> Path:
    repository, revision = split_name(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # errors of the network have many types
        why = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        rule = f"neither a folder nor available from the Hugging Face Hub ({why})"
        remedy = "give a folder, or run `zeroscale prepare` where there is a network"
        raise UserError(f"model.checkpoint={name}", rule, remedy) from error


def read_config(checkpoint: str) -> Any:
    """Return the content of a checkpoint's config.json."""
    folder = find_folder(checkpoint, [CONFIG, ADAPTER_CONFIG])
    if not (folder / CONFIG).is_file():
        _refuse_adapters(checkpoint, folder)
        remedy = "give a folder that transformers' save_pretrained wrote"
        raise UserError(f"model.checkpoint={checkpoint}", f"has no {CONFIG}", remedy)
    return read_json(folder / CONFIG, f"model.checkpoint={checkpoint}")


def describe(checkpoint: str) -> Any:
    """Return the content of a checkpoint's config.json with the additional key STORES_HEAD. The value of this key is
    True if the weights have a separate head, and False if they have none. The key is missing for weights on the Hub,
    which are not fetched here, and for weights that cannot be read."""
    config = read_config(checkpoint)
    if not (isinstance(config, dict) and is_folder(checkpoint)):
        return config
    try:
        return config | {STORES_HEAD: _HEAD in read_headers(checkpoint, Path(checkpoint))}
    except UserError:  # reported by `check_weights` if the weights are needed
        return config


def _refuse_adapters(checkpoint: str, folder: Path) -> None:
    """Raise UserError if a folder has adapters of peft where a full model is needed."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    config = read_json(path, f"model.checkpoint={checkpoint}", ADAPTER_CONFIG)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    of_base, start = (f" for the base model {base}", f"start from model.checkpoint={base}, or ") if base else ("", "")
    merge = "merge them into their base model with peft's merge_and_unload and save_pretrained, and give that folder"
    raise UserError(f"model.checkpoint={checkpoint}", f"has adapters{of_base}, and no model", start + merge)


def read_json(path: Path, given: str, name: str = CONFIG) -> Any:
    """Return the content of a JSON file. Raise UserError if the file cannot be read. The error message contains the
    name of the file, `name`, and the setting that led to the file, `given`, such as `model.checkpoint=FOLDER`."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(given, f"not a readable {name} ({why})") from error


def list_files(checkpoint: str, folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raise UserError if there are none, or if one is missing."""
    names = set(_read_index(checkpoint, folder).values()) or {WEIGHTS}
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        _refuse_adapters(checkpoint, folder)
        remedy = "copy or download it" if len(missing) < len(names) else "write one with transformers' save_pretrained"
        raise UserError(f"model.checkpoint={checkpoint}", f"has no {missing[0]}", remedy)
    return [folder / name for name in sorted(names)]


def _read_index(checkpoint: str, folder: Path) -> dict[str, str]:
    """Return a mapping from the name of each tensor to the name of the file that contains it; empty if the checkpoint
    has no index."""
    index = folder / INDEX
    try:
        return dict(json.loads(index.read_text())["weight_map"].items()) if index.exists() else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model.checkpoint={checkpoint}", f"{INDEX} is not an index of safetensors") from error


def compute_fingerprint(checkpoint: str, folder: Path) -> str:
    """Return a hash of the names, sizes and some blocks of the weight files of a checkpoint. Blocks are read in place
    of whole files, which may have many gigabytes. After a training, practically every block differs."""
    digest = hashlib.sha256()
    for path in list_files(checkpoint, folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in range(_BLOCKS):
                file.seek(size * place // _BLOCKS)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


class StoredTensor(NamedTuple):
    """A tensor in the header of a safetensors file."""

    file: str
    dtype: str  # such as "F32"
    shape: tuple[int, ...]


def check_weights(checkpoint: str | None) -> None:
    """Raise UserError if the weights of a local folder are incomplete or damaged. Weights on the Hub are not fetched,
    and so not checked."""
    if checkpoint is not None and is_folder(checkpoint):
        paths = list_files(checkpoint, Path(checkpoint))
        stamps = tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
        _check_headers(checkpoint, stamps)


@functools.lru_cache(maxsize=64)  # points of a sweep share a checkpoint
def _check_headers(checkpoint: str, stamps: tuple[tuple[str, int, int], ...]) -> None:
    read_headers(checkpoint, Path(checkpoint))


def read_headers(checkpoint: str, folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by name, from the headers of its files. Raise UserError for a damaged or
    truncated file. Raise UserError also if the index names a file for a tensor, but this file does not contain the
    tensor."""
    value, found = f"model.checkpoint={checkpoint}", dict[str, StoredTensor]()
    for path in list_files(checkpoint, folder):
        try:
            found |= _read_header(path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = error.args[0] if isinstance(error, _Damaged) else "its header cannot be read"
            remedy = "copy or download the file again"
            raise UserError(value, f"{path.name} is damaged: {why}", remedy) from error
    for name, file in _read_index(checkpoint, folder).items():
        if name not in found or found[name].file != file:
            rule = f"{file} lacks the tensor {name}, which {INDEX} lists"
            raise UserError(value, rule, "copy or download both files again")
    return found


class _Damaged(ValueError):
    """Error: a file is not a complete safetensors file. Its argument is the reason as text."""


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_LENGTH_BYTES)
        length = int.from_bytes(begin, "little")
        if begin == _POINTER:
            raise _Damaged("it is a pointer of Git LFS, without the weights")
        if len(begin) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise _Damaged(f"its {size:,} bytes do not begin with a header of safetensors")
        plain = json.loads(file.read(length))
    tensors = {name: one for name, one in plain.items() if name != "__metadata__"}
    described = _LENGTH_BYTES + length + max((one["data_offsets"][1] for one in tensors.values()), default=0)
    if described != size:
        raise _Damaged(f"its header describes {described:,} bytes, and it has {size:,}")
    return {name: StoredTensor(path.name, str(one["dtype"]), tuple(one["shape"])) for name, one in tensors.items()}


def check_shape(model: str, shape: Mapping[str, Any], stored: Mapping[str, Any], checkpoint: str) -> None:
    """Raise UserError if two sets of model sizes differ in a value. `stored` has the sizes from a checkpoint's
    config.json, and `shape` has the sizes of the model named `model`."""
    for name, value in stored.items():
        if shape.get(name) != value:
            rule = f"its {CONFIG} has {name}={value}, and model={model} has {shape.get(name)}"
            raise UserError(f"model.checkpoint={checkpoint}", rule, "choose model=hugging_face to read its shape")
