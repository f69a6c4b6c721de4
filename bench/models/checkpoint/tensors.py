"""Reading and writing of weights in safetensors, one tensor at a time, so that no rank holds the whole model.

Files are mapped into memory. A rank therefore reads only the bytes that it copies: one tensor, or the rank's slice of
one tensor.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from bench import engines, models
from bench.core.errors import UserError
from bench.core.plugins import StoredFamilyBuilder, Whole
from bench.core.spec import RunSpec
from bench.engines.distributed.slices import find_slice
from bench.engines.precision.update import torch_dtype
from bench.models.checkpoint import (
    ADAPTER_WEIGHTS,
    CONFIG,
    INDEX,
    WEIGHTS,
    find_folder,
    read_config,
    read_headers,
    split_name,
)

SHARD_BYTES = 2**30
"""Size in bytes from which a file of weights is written and the next file begins. The writing rank therefore holds at
most this many bytes and one more tensor."""
_ADAPTER = re.compile(r"(?P<owner>.+)\.(?P<kind>lora_[AB])\.default\.weight")
"""Pattern of the names that peft gives to the two matrices of an adapter. `owner` is the name of the adapted matrix."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 3
"""Maximum number of tensors that an error message names. Of further tensors, the message has only the number."""


def _keep(tensor: Tensor) -> Tensor:
    return tensor


class StoredForm(NamedTuple):
    """Name and layout of a parameter in transformers' format. Conversions return views where that is possible."""

    name: str
    is_transposed: bool = False  # True for a matrix whose stored rows are its columns
    order_rows: Callable[[Tensor], Tensor] = _keep  # returns a tensor with its rows in the order of transformers …
    restore_rows: Callable[[Tensor], Tensor] = _keep  # … and back in the order of the model

    def to_stored(self, tensor: Tensor) -> Tensor:
        """Return a parameter of the model in the layout of transformers."""
        rows = self.order_rows(tensor)
        return rows.T if self.is_transposed else rows

    def from_stored(self, stored: Tensor) -> Tensor:
        """Return a stored tensor in the model's layout. Reverses `to_stored`."""
        return self.restore_rows(stored.T if self.is_transposed else stored)


class StoredTensors:
    """Tensors of all files of a checkpoint, by name. A context manager, which closes the files."""

    def __init__(self, checkpoint: str, folder: Path) -> None:
        self._checkpoint, self._open = checkpoint, ExitStack()
        self._headers = read_headers(checkpoint, folder)
        try:
            self._files: dict[str, Any] = {
                name: self._open.enter_context(safe_open(folder / name, "pt"))
                for name in sorted({header.file for header in self._headers.values()})
            }
        except (OSError, SafetensorError) as error:
            why = str(error).partition("\n")[0]
            raise UserError(f"model.checkpoint={checkpoint}", f"a file is not safetensors ({why})") from error

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._headers)

    def find(self, name: str) -> str | None:
        """Return the name under which a tensor is stored; None if it is not in the checkpoint. A checkpoint of a model
        without a head, such as GPT-2's, stores each tensor without the first component of its name (`h.0` instead of
        `transformer.h.0`)."""
        return next((stored for stored in (name, name.partition(".")[2]) if stored in self._headers), None)

    def read(self, stored: str) -> Tensor:
        """Return a tensor as a view of its file, which is mapped into memory."""
        tensor: Tensor = self._files[self._headers[stored].file].get_tensor(stored)
        return tensor

    def check(self, stored: str, shape: Sequence[int]) -> None:
        """Raise UserError unless a tensor has this shape and a floating-point dtype."""
        header, value = self._headers[stored], f"model.checkpoint={self._checkpoint}"
        if header.shape != tuple(shape):
            rule = f"tensor {stored} is {_format_shape(header.shape)}, and the model has {_format_shape(shape)}"
            raise UserError(value, rule, "choose the model of the checkpoint, or model=hugging_face")
        if header.dtype not in _FLOATS:
            rule = f"tensor {stored} has dtype {header.dtype}, and only {', '.join(_FLOATS)} are loaded"
            raise UserError(value, rule, "choose a checkpoint that is not quantised")


def load_weights(module: Module, spec: RunSpec, whole: Whole, folder: Path, *, is_main: bool) -> None:
    """Set every weight of `module` from the checkpoint in `folder`, in the dtype that the parameter has.

    Arguments: `module` is the model or this rank's part of the model. `whole` is the engine's function that makes
    partitioned parameters whole (`EngineBuilder.whole`). `is_main` is True on rank 0. Raise UserError unless the
    checkpoint has exactly the tensors of the model. All ranks must call this function.
    """
    checkpoint, facts = str(spec.model.checkpoint), engines.facts(spec)
    family = models.load_stored_builder(spec.model.family)
    # If weights of whole models are partitioned, `whole` gives the values of rank 0 to the other ranks.
    partitioned = facts.cut is None and facts.division is not None and facts.division.weights > 1
    reads = is_main or not partitioned
    with StoredTensors(checkpoint, folder) as stored:
        names = _match(spec, family, stored)
        for name, parameter in module.named_parameters():  # shared parameters appear once
            part = find_slice(parameter)  # a slice is read alone, and needs no memory for the whole
            with whole([parameter]) if part is None else nullcontext(), torch.no_grad():
                if reads:
                    first, *others = names[name]
                    _check_equal(stored, first, others, checkpoint)
                    value = family.stored_form(spec, name).from_stored(stored.read(first))
                    parameter.copy_(value if part is None else part.cut(value))
        for name, buffer in engines.list_buffers(module):
            if (found := stored.find(family.stored_form(spec, name).name)) is not None:
                buffer.copy_(stored.read(found))


def count_tensors(spec: RunSpec) -> int:
    """Return the number of tensors in the checkpoint of a model. Raise UserError unless the checkpoint has exactly the
    tensors of the model."""
    with StoredTensors(str(spec.model.checkpoint), find_folder(str(spec.model.checkpoint))) as stored:
        _match(spec, models.load_stored_builder(spec.model.family), stored)
        return len(stored.names)


def _match(spec: RunSpec, family: StoredFamilyBuilder, stored: StoredTensors) -> dict[str, list[str]]:
    """Return a mapping from the name of each parameter of the whole model to the names under which it is stored. A tied
    parameter may be stored under several names. Raise UserError if the stored tensors are not exactly those of the
    model."""
    model = family.build(spec, torch.device("meta"))
    aliases: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    matched: dict[str, list[str]] = {}
    missing, known = [], {stored.find(family.stored_form(spec, name).name) for name, _ in engines.list_buffers(model)}
    for weight, own in aliases.items():
        forms = [family.stored_form(spec, name) for name in own]
        found = [one for form in forms if (one := stored.find(form.name)) is not None]
        for one in found:
            stored.check(one, forms[0].to_stored(weight).shape)
        missing += [] if found else [forms[0].name]
        known |= {*found}
        matched |= {name: sorted(set(found), key=found.index) for name in own}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # transformers' own attribute
    extra = sorted(name for name in stored.names - known if not any(re.search(one, name) for one in ignored))
    for found, rule in ((missing, "lacks"), (extra, "has tensors that the model lacks:")):
        if found:
            listed = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            remedy = "choose the model of the checkpoint, or model=hugging_face"
            raise UserError(f"model.checkpoint={spec.model.checkpoint}", f"{rule} {listed}", remedy)
    return matched


def _check_equal(stored: StoredTensors, first: str, others: Sequence[str], checkpoint: str) -> None:
    """Raise UserError unless the tensors of a tied parameter are equal."""
    for other in others:
        if not torch.equal(stored.read(first), stored.read(other)):
            rule = f"{first} and {other} differ, and the model has one parameter for both"
            raise UserError(f"model.checkpoint={checkpoint}", rule, "choose a model with a separate head")


def _format_shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "a scalar"


def save_weights(spec: RunSpec, weights: Iterable[tuple[str, Tensor]], folder: Path, *, is_main: bool) -> None:
    """Write a trained model as config.json and safetensors. transformers' `from_pretrained` can load the model from
    these files.

    `weights` yields each parameter and buffer by name, whole and in the run's precision, on every rank. Rank 0 writes.
    All ranks must call this function.
    """
    family, writer = models.load_stored_builder(spec.model.family), ShardWriter(folder)
    for name, value in weights:
        if is_main:
            form = family.stored_form(spec, name)
            writer.add(form.name, form.to_stored(value.detach()))
    if is_main:
        writer.finish()
        (folder / CONFIG).write_text(json.dumps(build_config(spec), indent=2) + "\n")


def save_adapters(spec: RunSpec, weights: Iterable[tuple[str, Tensor]], folder: Path, *, is_main: bool) -> None:
    """Write the adapters of a trained model in peft's format. `PeftModel.from_pretrained` can then add them to the
    model of transformers. `weights` yields the trained parameters by name, whole and in the run's precision, on every
    rank. Rank 0 writes. All ranks must call this function."""
    from peft import LoraConfig  # an optional dependency

    family, stored, targets = models.load_stored_builder(spec.model.family), dict[str, Tensor](), dict[str, bool]()
    for name, value in weights:
        if is_main and (found := _ADAPTER.fullmatch(name)):
            form = family.stored_form(spec, f"{found['owner']}.weight")
            owner = form.name.removesuffix(".weight")
            # the second matrix has the rows of the adapted one
            rows = form.order_rows(value.detach()) if found["kind"] == "lora_B" else value.detach()
            stored[f"base_model.model.{owner}.{found['kind']}.weight"] = rows.to("cpu", copy=True).contiguous()
            targets[owner] = form.is_transposed
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(stored, folder / ADAPTER_WEIGHTS, {"format": "pt"})
        values: dict[str, Any] = {
            "r": spec.adapter.rank, "lora_alpha": spec.adapter.alpha, "lora_dropout": spec.adapter.dropout,
            "target_modules": sorted(targets), "fan_in_fan_out": any(targets.values()), "inference_mode": True,
            "task_type": "SEQ_2_SEQ_LM" if len(spec.sequence) > 1 else "CAUSAL_LM",
            **dict(zip(("base_model_name_or_path", "revision"), split_name(str(spec.model.checkpoint)), strict=True)),
        }  # fmt: skip
        LoraConfig(**values).save_pretrained(str(folder))


def build_config(spec: RunSpec) -> dict[str, Any]:
    """Return the content of the config.json of a model. Raise UserError if transformers has no such model.

    If the run began with a checkpoint, the content is based on the checkpoint's config.json, which also has the ids of
    special tokens. Otherwise the content is based on transformers' defaults for this model. Default ids of special
    tokens are then removed if they are outside the model's vocabulary.
    """
    family = models.load_stored_builder(spec.model.family)
    checkpoint = spec.model.checkpoint
    config = family.transformers_config(spec).to_dict() if checkpoint is None else read_config(checkpoint)
    if checkpoint is None:  # transformers' defaults are ids of the published vocabulary, such as 50256 for GPT-2
        ids = [key for key in config if key.endswith("_token_id") and isinstance(config[key], int)]
        config |= {key: None for key in ids if config[key] >= config["vocab_size"]}
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}  # older name of dtype
    return kept | {"dtype": str(torch_dtype(spec.precision)).removeprefix("torch.")}


class ShardWriter:
    """Writer of tensors into files of about SHARD_BYTES, with an index if there are several."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._waiting, self._bytes = folder, dict[str, Tensor](), 0
        self._files: list[list[str]] = []  # names of the tensors in each file
        self._total = 0  # bytes in all files

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a copy of a tensor."""
        self._waiting[name] = tensor.to("cpu", copy=True).contiguous()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes
        if self._bytes >= SHARD_BYTES:
            self._write()

    def finish(self) -> None:
        """Write the remaining tensors, and the index. Each file's name contains the number of files, so the files are
        renamed now."""
        if self._waiting:
            self._write()
        count = len(self._files)
        if count == 1:
            self._find(1).rename(self._folder / WEIGHTS)
            return
        stem, places = WEIGHTS.removesuffix(".safetensors"), dict[str, str]()
        for number, names in enumerate(self._files, start=1):
            path = self._find(number).rename(self._folder / f"{stem}-{number:05}-of-{count:05}.safetensors")
            places |= dict.fromkeys(names, path.name)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(places.items()))}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files.append(sorted(self._waiting))
        save_file(self._waiting, self._find(len(self._files)), {"format": "pt"})
        self._waiting, self._bytes = {}, 0

    def _find(self, number: int) -> Path:
        return self._folder / f".part-{number}"
