"""Tests of `zeroscale prepare`, which stores all data and compiled ops that a run without a network needs.

A missing item is reported in one line.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import cli, engines
from bench.config import compose
from bench.config.compose import Request
from bench.core.errors import UserError
from bench.runtime import extensions
from bench.runtime.worker import RankWorker
from bench.sweep import prepare as preparation

TOKENIZER = "somebody/small-t5"
TEXT = ("machine=cpu", "data=text", "sequence.encoder=64", "sequence.decoder=32")
NATIVE = ("machine=cpu", "optimizer.implementation=native")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench.cli", "prepare", *words, "--json"]


def caches(folder: Path) -> dict[str, str]:
    """Return environment variables that make all libraries use new, empty cache folders inside `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TORCH_"))}
    return kept | {"HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}


class Prepared:
    """Result of a call of `zeroscale prepare` with its own cache folders: its exit code, and the findings that it
    printed."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        done = subprocess.run(
            command(*words), env=caches(folder) | environment, capture_output=True, text=True, timeout=250
        )
        self.code, self.findings = done.returncode, json.loads(done.stdout)

    def states(self) -> list[tuple[str, str]]:
        return [(finding["subject"], finding["state"]) for finding in self.findings]

    def missing(self) -> list[str]:
        return [f"{found['found']}; {found['remedy']}" for found in self.findings if found["state"] == "missing"]


class Hub(ThreadingHTTPServer):
    """Small HTTP server that replaces the Hugging Face hub. It serves a tokenizer, with the HTTP headers that
    huggingface_hub needs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.asked = folder, 0
        self.address = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> bytes:
        self.server.asked += 1
        path = self.server.folder / self.path.rpartition("/")[2]
        found = self.path.startswith(f"/{TOKENIZER}/resolve/") and path.is_file()
        content = path.read_bytes() if found else b""
        self.send_response(200 if found else 404)
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        if not found:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        return content

    def do_GET(self) -> None:
        self.wfile.write(self.do_HEAD())

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = ["<pad>", "</s>", "<unk>", "import", *(f"<extra_id_{n}>" for n in range(100))]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")
    whole.save_pretrained(tmp_path / "hub")
    with Hub(tmp_path / "hub") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.processes
@pytest.mark.cold
@pytest.mark.thorough
def test_staged_files_suffice_without_a_network(tmp_path: Path, hub: Hub) -> None:
    words = (*TEXT, f"data.tokenizer={TOKENIZER}")
    staged = Prepared(tmp_path, *words, HF_ENDPOINT=hub.address)
    assert (staged.code, staged.missing()) == (0, [])
    assert staged.states()[:2] == [("data text", "ok"), (f"tokenizer {TOKENIZER}", "ok")]
    assert (
        "4,000,000 bytes of text" in staged.findings[0]["found"] and str(tmp_path / "hf") in staged.findings[0]["found"]
    )

    asked = hub.asked
    checked = Prepared(tmp_path, *words, "--offline", HF_ENDPOINT=hub.address)
    assert (checked.code, hub.asked) == (0, asked)
    network = "ok" if preparation.find_network_isolation() else "note"
    assert checked.states() == [
        ("network", network), ("libraries", "ok"), ("model tiny", "ok"), ("data text", "ok"),
        ("CPU memory counter", "ok"),
    ]  # fmt: skip
    assert len(list((tmp_path / "hf" / "datasets" / "generator").iterdir())) == 1, "the corpus was made again"


@pytest.mark.processes
@pytest.mark.cold
def test_unavailable_data_set_is_reported_in_one_line_and_ends_the_preparation(tmp_path: Path) -> None:
    staged = Prepared(tmp_path, *TEXT, "data.hub=nobody/nothing", HF_HUB_OFFLINE="1")
    assert staged.code == 1
    (line,) = staged.missing()
    assert line.startswith("data.hub=nobody/nothing: ") and line.endswith("; correct the name or give data.files")
    assert "libraries" not in dict(staged.states())


@pytest.mark.processes
@pytest.mark.cold
def test_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    checked = Prepared(tmp_path, *TEXT, f"data.tokenizer={TOKENIZER}", "--offline")
    assert checked.code == 1
    (line,) = checked.missing()
    assert line.startswith(f"data.tokenizer={TOKENIZER}: ")
    assert line.endswith("run `zeroscale prepare` on a machine with a network")


@pytest.mark.processes
@pytest.mark.cold
def test_interrupted_build_leaves_no_files_and_no_processes(tmp_path: Path) -> None:
    process = subprocess.Popen(command(*NATIVE), env=caches(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    builds = tmp_path / "cache" / "zeroscale" / "extensions"
    while not list(builds.glob("*/.*/fused_adam/build.ninja")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=250)
    assert (process.returncode, errors) == (130, b"zeroscale: interrupted\n")
    assert [path for folder in builds.iterdir() for path in folder.iterdir()] == []
    assert users_of(tmp_path) == []


def users_of(folder: Path) -> list[str]:
    """Return the command lines of running processes whose environment variables contain the path `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().decode())
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found


@pytest.mark.processes
@pytest.mark.cold
def test_container_jobs_are_checked_by_a_job_in_the_same_container(tmp_path: Path) -> None:
    words = ("launcher=slurm_gpu_pyxis", "machine=h200", "devices_per_node=2", f"--results={tmp_path}")
    staged = Prepared(tmp_path, *words)
    assert staged.states() == [("data synthetic", "ok"), ("compute node", "note")]
    script = tmp_path / "adhoc" / "prepare" / "node" / "job.sh"
    assert str(script) in staged.findings[-1]["remedy"]
    last = script.read_text().splitlines()[-3:]
    assert "--container-image=/shared/my_project/images/zeroscale.sqsh" in last[1]
    command = "prepare launcher=slurm_gpu_pyxis machine=h200 devices_per_node=2 --offline"
    assert last[2].strip() == f"python3 -P -m bench.cli {command}"


@pytest.mark.processes
@pytest.mark.cold
def test_prepare_imports_no_training_library() -> None:
    heavy = {"torch", "deepspeed", "transformers", "datasets"}
    script = (
        f"import sys, bench.cli.prepare, bench.sweep.prepare; assert not {heavy} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("launcher=slurm_gpu_pyxis", "machine=h200", "devices_per_node=2", "--offline"),
            "--offline: jobs run in the container /shared/",
        ),
        (
            ("machine=h200", "devices_per_node=2", "--arch", "hopper"),
            "--arch hopper: is not a list of GPU architectures; write for example 8.0,9.0",
        ),
        (("study=smoke,paper",), "study=smoke,paper: only one study is supported"),
    ],
)
def test_contradicting_requests_are_refused(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["prepare", *words]) == 2
    assert capsys.readouterr().err.startswith(f"zeroscale: {expected}")


def test_architecture_that_jobs_do_not_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0")
    with pytest.raises(UserError, match=r"the jobs' environment sets TORCH_CUDA_ARCH_LIST=8\.0;9\.0"):
        preparation.architectures(["9.0"], asked())


def test_builds_of_two_architectures_have_separate_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/mine")
    assert preparation.architectures(["9.0"], asked()) == ["9.0"]
    with pytest.raises(UserError, match="TORCH_EXTENSIONS_DIR=/mine holds the builds for one"):
        preparation.architectures(["8.0", "9.0"], asked())


def asked(*overrides: str) -> Request:
    return compose.compose_request(compose.parse_single(["devices_per_node=2", *overrides]))


def test_equal_needs_of_several_points_are_staged_once() -> None:
    points = [
        asked(
            "machine=h200", "data=text", f"engine={engine}", f"batch.micro={micro}", f"optimizer.implementation={how}"
        )
        for engine in ("zero1", "zero2")
        for micro in (1, 2)
        for how in ("torch", "native")
    ]
    found = preparation.collect_needs(points, ["8.0", "9.0"])
    assert [(kind.device, kind.operations, kind.architecture) for kind in found] == [
        ("cuda", (), None),
        ("cuda", ("FusedAdam",), "8.0"),
        ("cuda", ("FusedAdam",), "9.0"),
    ]
    assert [(len(kind.data), len(kind.models)) for kind in found] == [(1, 1), (0, 0), (0, 0)]


def test_text_length_and_vocabulary_distinguish_needs() -> None:
    points = [asked("data=text"), asked("data=text", "sequence.encoder=64"), asked("data=text", "model=mt5_small")]
    (kind,) = preparation.collect_needs(points)
    assert (len(kind.data), len(kind.models)) == (3, 2)


@pytest.mark.parametrize(
    ("overrides", "operations"),
    [
        (("engine=ddp",), ()),
        (("engine=zero3",), ()),
        (("engine=zero2", "optimizer.implementation=native"), ("FusedAdam",)),
        (("engine=zero2", "engine.offload_optimizer.device=cpu", "optimizer.implementation=native"), ("CPUAdam",)),
        (("engine=zero3", "engine.zero_quantized_weights=true"), ("Quantizer",)),
        (
            ("engine=zero3", "engine.offload_param.device=nvme", "engine.offload_param.nvme_path=/scratch"),
            ("PinMemory", "AsyncIO"),
        ),
    ],
)
def test_ops_that_a_run_loads_by_engine_and_options(overrides: tuple[str, ...], operations: tuple[str, ...]) -> None:
    assert engines.facts(asked(*overrides).spec).compiled_ops == operations


def test_op_without_its_library_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")  # DeepSpeed compiles a test program for libaio with it
    with pytest.raises(UserError, match="DeepSpeed's op AsyncIO: it cannot be built without libaio; install libaio"):
        extensions.load("AsyncIO", "cpu", tmp_path)


def folder_of_builds(device: str, *names: str, **variables: str) -> str:
    return extensions.build_environment(names, device, {"XDG_CACHE_HOME": "/home", **variables})[extensions.FOLDER]


def test_builds_for_different_nodes_have_separate_folders() -> None:
    processor = folder_of_builds("cpu", "CPUAdam")
    h100 = folder_of_builds("cuda", "FusedAdam", TORCH_CUDA_ARCH_LIST="9.0")
    a100 = folder_of_builds("cuda", "FusedAdam", TORCH_CUDA_ARCH_LIST="8.0")
    image = folder_of_builds("cuda", "FusedAdam", TORCH_CUDA_ARCH_LIST="9.0", ZEROSCALE_CONTAINER_DIGEST="sha256:12ab")
    assert len({processor, h100, a100, image}) == 4
    assert Path(h100).name.endswith("-sm90") and Path(image).name == f"{Path(h100).name}-sha256_12ab"
    assert h100.startswith("/home/zeroscale/extensions/cpython-3")


def test_cpu_op_on_a_gpu_node_is_built_for_the_processor() -> None:
    assert folder_of_builds("cuda", "CPUAdam") == folder_of_builds("cpu", "CPUAdam")


def test_chosen_build_folder_and_runs_without_ops_are_unchanged() -> None:
    assert extensions.build_environment(["CPUAdam"], "cpu", {extensions.FOLDER: "/mine"}) == {}
    assert extensions.build_environment([], "cpu", {}) == {}


@pytest.fixture
def greeting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Register with DeepSpeed a small op that takes about a second to compile. Return the folder for compiled ops."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.ops import op_builder
    from torch.utils import _cpp_extension_versioner, cpp_extension

    class GreetingBuilder(op_builder.OpBuilder):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("greeting")

        def absolute_name(self) -> str:
            return "greeting"

        def sources(self) -> list[str]:
            return [str(tmp_path / "greeting.cpp")]

    (tmp_path / "greeting.cpp").write_text(
        "#include <Python.h>\n"
        'static PyModuleDef greeting = {PyModuleDef_HEAD_INIT, "greeting", nullptr, -1, nullptr};\n'
        "PyMODINIT_FUNC PyInit_greeting() { return PyModule_Create(&greeting); }\n"
    )
    monkeypatch.setattr(op_builder, "GreetingBuilder", GreetingBuilder, raising=False)
    monkeypatch.setattr(op_builder.OpBuilder, "_loaded_ops", {})
    # torch's loader renames an op that this process has already built in another folder
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", _cpp_extension_versioner.ExtensionVersioner())
    monkeypatch.setenv(extensions.FOLDER, str(tmp_path / "builds"))
    return tmp_path / "builds"


def test_op_is_built_once_and_installed_atomically(greeting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops import op_builder
    from torch.utils import _cpp_extension_versioner, cpp_extension

    assert extensions.load("Greeting", "cpu", greeting)
    assert os.environ[extensions.FOLDER] == str(greeting)
    assert [path.name for path in greeting.iterdir()] == ["greeting"]
    op_builder.OpBuilder._loaded_ops.clear()  # removes what this process has cached, as in a new process
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", _cpp_extension_versioner.ExtensionVersioner())
    assert not extensions.load("Greeting", "cpu", greeting)


@pytest.mark.parametrize(
    ("local_rank", "order"),
    [(0, ["CPUAdam", "barrier", "barrier"]), (1, ["barrier", "CPUAdam", "barrier"])],
)
def test_first_rank_of_a_node_builds_ops_in_a_phase_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: int, order: list[str]
) -> None:
    done: list[str] = []
    rank = RankWorker.__new__(RankWorker)
    rank.spec = asked("engine=zero2", "engine.offload_optimizer.device=cpu", "optimizer.implementation=native").spec
    rank.local_rank, rank.device, rank.phases_s = local_rank, torch.device("cpu"), {}
    rank.channel = SimpleNamespace(beat=lambda phase, step=-1: None)  # type: ignore[assignment]
    rank.peers = SimpleNamespace(barrier=lambda: done.append("barrier"))  # type: ignore[assignment]
    monkeypatch.setattr(extensions, "load", lambda name, device, folder: done.append(name))
    monkeypatch.delenv(extensions.FOLDER, raising=False)
    rank.load_operations()
    assert (done, rank.phases_s) == ([], {}), "without a build folder, the engine chooses its own"
    monkeypatch.setenv(extensions.FOLDER, str(tmp_path))
    rank.load_operations()
    assert done == order and list(rank.phases_s) == ["ops"]


def test_op_in_our_cache_loads_in_spite_of_the_lock_of_a_killed_process(
    greeting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops import op_builder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "zeroscale" / "extensions" / "versions"
    assert extensions.load("Greeting", "cpu", folder)
    lock = folder / "greeting" / "lock"
    assert not lock.exists()
    lock.touch()
    op_builder.OpBuilder._loaded_ops.clear()  # removes what this process has cached, as in a new process
    assert not extensions.load("Greeting", "cpu", folder)
    assert op_builder.GreetingBuilder().load().__file__ == str(folder / "greeting" / "greeting.so")


def test_lock_of_a_killed_build_is_reported_at_once(greeting: Path) -> None:
    lock = greeting / "greeting" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    with pytest.raises(UserError, match=r"lock: a killed build left this lock file.*; delete this file$"):
        extensions.load("Greeting", "cpu", greeting)
