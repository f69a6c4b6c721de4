"""Tests of the order and the padding of micro-batches. The order must be the same for any number of loader processes.
Each sample consists of its own index, so that a batch shows which samples it contains."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from bench import data
from bench.core.errors import UserError
from bench.core.spec import RunSpec
from bench.data.pipeline import loader

MakeSpec = Callable[..., RunSpec]


class Indices:
    """Data stream that returns the encoder tokens and the decoder tokens of a sample. All tokens of sample i have the
    value i. Samples have different lengths."""

    padded = frozenset({"encoder", "decoder"})

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(1 + index % 7, index), np.full(1 + index % 3, index)


def steps(spec: RunSpec, count: int) -> list[list[int]]:
    """Return the sample indices of each of `count` optimizer steps. The indices of a step include the samples of all
    data-parallel ranks."""
    ranks = [loader.micro_batches(Indices(), spec, rank) for rank in range(spec.data_parallel)]
    return [
        sorted(
            sample
            for batches in ranks
            for batch in islice(batches, spec.accumulation)
            for sample in batch.tensors["labels"][:, 0].tolist()
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("nodes", "devices", "micro", "accumulation"), [(1, 1, 24, 1), (1, 1, 4, 6), (2, 2, 3, 2), (3, 4, 1, 2)]
)
def test_samples_of_a_global_batch_do_not_depend_on_ranks_and_micro_batch_size(
    make_spec: MakeSpec, nodes: int, devices: int, micro: int, accumulation: int
) -> None:
    batch = {"micro": micro, "accumulation": accumulation}
    spec = make_spec(nodes=nodes, devices_per_node=devices, batch=batch)
    assert spec.global_batch == 24
    assert steps(spec, 3) == [list(range(24)), list(range(24, 48)), list(range(48, 72))]


def test_padding_is_masked_and_counted(make_spec: MakeSpec) -> None:
    spec = make_spec(batch={"micro": 4}, sequence={"encoder": 8, "decoder": 4})
    tensors, padding = next(loader.micro_batches(Indices(), spec, 0))
    assert tensors["attention_mask"].sum(1).tolist() == [1, 2, 3, 4]
    assert tensors["input_ids"][2].tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    assert tensors["labels"][2].tolist() == [2, 2, 2, -100]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int64}
    assert padding["encoder"] == 4 * 8 - (1 + 2 + 3 + 4) == int((tensors["attention_mask"] == 0).sum())
    assert padding["decoder"] == 4 * 4 - (1 + 2 + 3 + 1) == int((tensors["labels"] == -100).sum())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((np.ones(9),), "data=synthetic: sample 0 has 1 rows; give a row for each kind of tokens: encoder, decoder"),
        ((np.ones(9), np.ones(2)), "sample 0 has 9 encoder tokens; give at most sequence.encoder=8 tokens"),
    ],
)
def test_sample_that_does_not_fit_the_objective_is_refused(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, rows: tuple[np.ndarray, ...], message: str
) -> None:
    monkeypatch.setattr(Indices, "__call__", lambda self, index: rows)
    spec = make_spec(sequence={"encoder": 8, "decoder": 4})
    with pytest.raises(UserError, match=re.escape(message)):
        next(loader.micro_batches(Indices(), spec, 0))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "its stream of micro-batches ended; make the stream endless"),
        ({"labels": None}, "its micro-batches lack labels, an argument of objective=span_corruption"),
        ({"labels": torch.ones(2, 5, dtype=torch.int64)}, "labels has shape (2, 5) and type torch.int64; give"),
        ({"labels": torch.ones(2, 4)}, "labels has shape (2, 4) and type torch.float32"),
        ({"labels": torch.full((2, 4), 384)}, "labels has token ids from 384 to 384"),
        ({"input_ids": torch.full((2, 8), -1)}, "input_ids has token ids from -1 to -1"),
    ],
)
def test_first_micro_batch_and_end_of_a_stream_are_checked(
    make_spec: MakeSpec, changed: dict[str, torch.Tensor | None], message: str
) -> None:
    spec = make_spec(sequence={"encoder": 8, "decoder": 4})
    good = next(loader.micro_batches(Indices(), spec, 0))
    tensors = {name: tensor for name, tensor in (good.tensors | changed).items() if tensor is not None}
    stream = data.check_stream(iter([good._replace(tensors=tensors)]), spec)
    with pytest.raises(UserError, match=re.escape(message)):
        assert [batch.tensors for batch in stream] == []


def test_loading_does_not_change_torchs_random_state(make_spec: MakeSpec) -> None:
    before = torch.get_rng_state()
    next(loader.micro_batches(Indices(), make_spec(), 0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.processes
def test_micro_batches_do_not_depend_on_the_number_of_workers(make_spec: MakeSpec) -> None:
    alone, shared = (
        data.load("synthetic").micro_batches(make_spec(workers=workers, devices_per_node=2), 1) for workers in (0, 2)
    )
    for one, other in zip(islice(alone, 7), shared, strict=False):
        assert one[1:] == other[1:]
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.processes
def test_workers_end_when_their_rank_is_killed(make_spec: MakeSpec, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(make_spec(workers=2).model_dump_json())
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import multiprocessing, pathlib, signal, sys\n"
        "from bench import data\n"
        "from bench.core import spec\n"
        "if __name__ == '__main__':\n"
        "    text = pathlib.Path(sys.argv[1]).read_text()\n"
        "    batches = data.load('synthetic').micro_batches(spec.RunSpec.model_validate_json(text), 0)\n"
        "    next(batches)\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, str(rank), str(tmp_path / "spec.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        servers = {worker.parent() for worker in workers}
        process.kill()
    assert len(workers) == 2
    _, left = psutil.wait_procs([*workers, *servers], timeout=60)
    assert left == []


def test_synthetic_samples_depend_only_on_seed_and_index(make_spec: MakeSpec) -> None:
    source = data.load("synthetic")
    first, again, other = (next(source.micro_batches(make_spec(seed=seed), 0)) for seed in (3, 3, 4))
    assert torch.equal(first.tensors["input_ids"], again.tensors["input_ids"])
    assert not torch.equal(first.tensors["input_ids"], other.tensors["input_ids"])
    assert not torch.equal(first.tensors["input_ids"][0], first.tensors["input_ids"][1])


def test_synthetic_samples_fill_the_sequence_and_use_the_whole_vocabulary(make_spec: MakeSpec) -> None:
    spec = make_spec(vocab=10, batch={"micro": 8})
    tensors, padding = next(data.load("synthetic").micro_batches(spec, 0))
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "input_ids": (8, 64),
        "labels": (8, 32),
    }
    assert padding == {"encoder": 0, "decoder": 0}
    assert set(tensors["input_ids"].unique().tolist()) == set(range(2, 10))


def test_synthetic_source_refuses_a_vocabulary_of_special_tokens_only(make_spec: MakeSpec) -> None:
    source = data.load("synthetic")
    source.check(source.Options(), make_spec(vocab=3))
    with pytest.raises(UserError, match=r"^model\.shape\.vocab=2: .*; give at least 3$"):
        source.check(source.Options(), make_spec(vocab=2))


def test_unknown_source_is_refused_with_a_list_of_sources() -> None:
    with pytest.raises(UserError, match="choose from instructions, mixture, synthetic, text"):
        data.load("pipeline")
