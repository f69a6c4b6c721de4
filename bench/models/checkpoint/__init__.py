"""Checkpoints in transformers' format: a folder with config.json and safetensors, or a name on the Hugging Face Hub.

This folder is not a model family. This file finds a checkpoint's files and does not import torch. `tensors` reads and
writes the weights.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.errors import UserError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # peft's name
FILES = CONFIG, INDEX, "*.safetensors"
"""Names of the files that are fetched from the Hub."""
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
    """Return the folder of a checkpoint. If it is a name on the Hub, fetch its files that match the patterns `files`
    and are not in the local cache. Raise UserError if there is no such folder or name, or if the Hub cannot be reached.
    """
    if is_folder(checkpoint):
        return Path(checkpoint)
    if not _HUB_NAME.fullmatch(checkpoint):
        remedy = f"give a folder with {CONFIG} and {WEIGHTS}, or a name on the Hugging Face Hub"
        raise UserError(f"model.checkpoint={checkpoint}", "no such folder", remedy)
    return _fetch(checkpoint, tuple(files))


def fetch_once(checkpoint: str, is_first: bool, barrier: Callable[[], None]) -> Path:
    """Return the folder of a checkpoint. If files have to be fetched, the first rank of a node (`is_first`) fetches
    them for all ranks of the node. `barrier` waits for all ranks. Collective."""
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
    return read_json(find_folder(checkpoint, [CONFIG]) / CONFIG, f"model.checkpoint={checkpoint}")


def read_json(path: Path, given: str) -> Any:
    """Return the content of a config.json. Raise UserError if it cannot be read; the error names `given`, the config
    key with its value."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(given, f"not a readable {CONFIG} ({why})") from error


def list_files(checkpoint: str, folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raise UserError if there are none, or if one is missing."""
    index = folder / INDEX
    try:
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {WEIGHTS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model.checkpoint={checkpoint}", f"{INDEX} is not an index of safetensors") from error
    if missing := sorted(name for name in names if not (folder / name).is_file()):
        remedy = "write one with transformers' save_pretrained"
        raise UserError(f"model.checkpoint={checkpoint}", f"has no {missing[0]}", remedy)
    return [folder / name for name in sorted(names)]


def check_shape(model: str, shape: Mapping[str, Any], stored: Mapping[str, Any], checkpoint: str) -> None:
    """Raise UserError if a value of `stored`, the shape in a checkpoint's config.json, differs from that of `shape`,
    the shape of the model named `model`."""
    for name, value in stored.items():
        if shape.get(name) != value:
            rule = f"its {CONFIG} has {name}={value}, and model={model} has {shape.get(name)}"
            raise UserError(f"model.checkpoint={checkpoint}", rule, "choose model=hugging_face to read its shape")
