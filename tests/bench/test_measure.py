"""Tests of the functions that measure memory, collectives and the host. Each is compared with an independent value."""

import gc
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.core.errors import UserError
from bench.core.files import get_cache_folder
from bench.core.formatting import describe_shortage
from bench.core.machine import Machine
from bench.measure import memory
from bench.measure.channel import SharedHeartbeat
from bench.measure.collectives import CollectiveCounter
from bench.measure.environment import select_variables
from bench.measure.failures import InjectedFault

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def counted() -> None:
    memory.install_counter(CPU)
    if memory.read_live_bytes(CPU) is None:
        pytest.skip("no C++ compiler")


@pytest.mark.usefixtures("counted")
def test_traced_peak_of_a_block_of_code_equals_a_hand_calculation() -> None:
    before = memory.read_live_bytes(CPU)
    memory.reset_peak(CPU)
    kept = torch.empty(1000, dtype=torch.float64)
    passing = torch.empty(2000, dtype=torch.float64)
    del passing
    after, peak = memory.read_live_bytes(CPU), memory.read_peak_bytes(CPU)
    assert before is not None and after is not None and peak is not None
    assert after - before == kept.nbytes == 8000
    assert peak - before == 24000


@pytest.mark.usefixtures("counted")
def test_memory_freed_by_another_thread_is_counted() -> None:
    """One thread allocates a tensor and another thread frees it, as gloo's threads do. The memory events of torch's
    profiler would miss that the memory was freed."""
    before = memory.read_live_bytes(CPU)
    box = [torch.empty(1 << 20)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert memory.read_live_bytes(CPU) == before


@pytest.mark.usefixtures("counted")
def test_freed_empty_buffers_leave_the_count_unchanged() -> None:
    """torch's fused attention allocates and frees a buffer of 0 bytes, which must not disturb the count of live
    bytes."""
    gc.collect()  # tensors of earlier tests would be freed by the collection below
    before = memory.read_live_bytes(CPU)
    query = torch.ones(2, 4, 64, 32, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    del query
    gc.collect()
    assert memory.read_live_bytes(CPU) == before


@pytest.mark.usefixtures("counted")
def test_counted_bytes_equal_the_storages_reachable_from_python() -> None:
    gc.collect()
    live, reachable = memory.read_live_bytes(CPU), memory.count_reachable_bytes(CPU)
    layer = torch.nn.Linear(300, 200)
    layer(torch.ones(7, 300)).sum().backward()
    expected = 2 * 4 * (300 * 200 + 200)  # weights and their gradients
    now, reached = memory.read_live_bytes(CPU), memory.count_reachable_bytes(CPU)
    assert now is not None and live is not None
    assert now - live == expected == reached - reachable


def test_fake_tensors_count_as_zero_bytes() -> None:
    before = memory.count_reachable_bytes(CPU)
    with FakeTensorMode():
        stand_in = torch.empty(1000)
    assert memory.count_reachable_bytes(CPU) == before
    assert stand_in.nbytes == 4000


@pytest.fixture
def group() -> object:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_payloads_of_collectives_are_counted_as_in_nccl_tests() -> None:
    whole, part = torch.ones(4000), torch.ones(1000)
    with CollectiveCounter(wait=lambda: None) as counter:
        dist.all_reduce(part)
        dist.all_reduce(part)
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.broadcast(part, src=0)
        dist.all_gather([torch.empty(1000) for _ in range(4)], part)
    assert dict(counter.calls) == {"all_reduce": 2, "all_gather": 2, "reduce_scatter": 1, "broadcast": 1}
    assert dict(counter.payload_bytes) == {
        "all_reduce": 2 * 4000,
        "all_gather": 2 * 16000,
        "reduce_scatter": 16000,
        "broadcast": 4000,
    }


@pytest.mark.usefixtures("group")
def test_functional_and_dtensor_collectives_are_counted() -> None:
    """A DTensor of 32 elements is divided among four ranks. Rank 0 holds a quarter of the elements. `full_tensor`
    gathers all 32 elements. `sum` adds the local elements first, so its all-reduce has a single element."""
    rows = DTensor.from_local(torch.ones(2, 4), init_device_mesh("cpu", (4,)), [Shard(0)], run_check=False)
    with CollectiveCounter(wait=lambda: None) as counter:
        (all_reduce(torch.ones(1000), "sum", dist.group.WORLD) + 1).sum()
        rows.full_tensor()
        (2 * rows).sum().full_tensor()
    assert dict(counter.calls) == {"all_reduce": 2, "all_gather": 1}
    assert dict(counter.payload_bytes) == {"all_reduce": 4000 + 4, "all_gather": 4 * 32}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_collective_counter_leaves_higher_order_operators_unchanged() -> None:
    query = torch.ones(1, 2, 16, 8)
    with CollectiveCounter(wait=lambda: None):
        attended = flex_attention(query, query, query, score_mod=lambda score, *_: score)
    assert attended.shape == query.shape


def test_compiled_code_stays_compiled_under_the_collective_counter() -> None:
    """Collectives are counted in the same steps in which the time outside of collectives is measured. If counting
    disabled the compiled code, the measured time would be that of uncompiled code."""
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*given: object) -> object:
            ran.append(len(given))
            return graph.forward(*given)

        return run

    layer = torch.compile(torch.nn.Linear(4, 4), backend=backend)
    layer(torch.ones(2, 4)).sum().backward()
    with CollectiveCounter(wait=lambda: None):
        layer(torch.ones(2, 4)).sum().backward()
    assert len(ran) == 2


@pytest.mark.processes
def test_asynchronous_collective_is_timed_until_its_completion(tmp_path: Path) -> None:
    """Two ranks start an asynchronous all-reduce over gloo. The second rank starts it half a second after the first
    rank. On the first rank, the measured time must include the wait for the second rank."""
    context = torch.multiprocessing.get_context("spawn")
    begun, results = context.Event(), context.Queue()
    ranks = [context.Process(target=come_late, args=(rank, tmp_path / "store", begun, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=PATIENCE_S) for _ in ranks)
    for rank in ranks:
        rank.join()
    (early_at, early_s), (late_at, late_s) = found[0], found[1]
    late_by_s = late_at - early_at  # at least half a second; both ranks read the same clock
    assert early_s > late_by_s / 2, "the early rank spends the other's delay in the collective"
    assert late_s < early_s - late_by_s / 2, "the late one does not"


LATE_S = 0.5
PATIENCE_S = 250.0  # for two processes to import torch on a busy machine


def come_late(rank: int, store: Path, begun: Event, results: "Queue[tuple[int, tuple[float, float]]]") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with CollectiveCounter(wait=lambda: None):
        dist.all_reduce(torch.ones(1000))  # the first all-reduce of a process opens connections
    with CollectiveCounter(wait=lambda: None) as counter:
        if rank == 1:
            assert begun.wait(PATIENCE_S)
            time.sleep(LATE_S)
        at = time.monotonic()
        begun.set()
        work = dist.all_reduce(torch.ones(1000), async_op=True)
    assert work is not None and work.is_completed()
    results.put((rank, (at, counter.inside_s)))


def test_shared_heartbeat_returns_the_progress_of_each_rank() -> None:
    pulse = SharedHeartbeat.create(2)
    pulse.write(0, "warm-up", -1)
    pulse.write(1, "steps", 12)
    assert (pulse.read(0).phase, pulse.read(0).step) == ("warm-up", -1)
    assert (pulse.read(1).phase, pulse.read(1).step) == ("steps", 12)


def test_relevant_variables_are_recorded_without_secrets() -> None:
    given = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "DS_API_KEY": "secret",
        "NCCL_PASSWORD": "secret",
        "HOME": "/home/somebody",
    }
    assert set(select_variables(given)) == {
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "CUDA_VISIBLE_DEVICES",
    }


def test_machine_accepts_only_its_own_devices() -> None:
    h200 = Machine(name="h200", device_names=("NVIDIA H200",))
    assert h200.accepts("NVIDIA H200")
    assert not h200.accepts("NVIDIA H100 80GB HBM3")
    assert not h200.accepts("NVIDIA H200 NVL"), "another card, with another peak"
    assert Machine(name="auto").accepts("whatever is here")


@pytest.mark.parametrize("text", ["rank=1", "rank=1 step=x action=sleep", "rank=1 step=2 action=dance"])
def test_invalid_drill_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSCALE_DRILL", text)
    with pytest.raises(UserError, match="ZEROSCALE_DRILL="):
        InjectedFault.read_environment()


@pytest.mark.parametrize(
    ("given", "folder"), [({}, None), ({"XDG_CACHE_HOME": ""}, None), ({"XDG_CACHE_HOME": "here"}, None),
                          ({"XDG_CACHE_HOME": "/cache"}, "/cache/zeroscale")]
)  # fmt: skip
def test_cache_folder_does_not_depend_on_the_current_folder(given: dict[str, str], folder: str | None) -> None:
    assert get_cache_folder(given) == Path(folder or Path.home() / ".cache" / "zeroscale")


def hold(megabytes: int, ready: Queue, end: Event) -> None:
    kept = bytearray(megabytes * 2**20)
    kept[::4096] = bytes(len(kept[::4096]))  # only pages that were written to are resident
    ready.put(len(kept))
    end.wait(PATIENCE_S)


@pytest.mark.processes
def test_memory_of_loaders_is_the_peak_of_their_resident_sets() -> None:
    """Two processes use 64 MiB each. They are started in the same way as DataLoader processes."""
    assert memory.read_loaders_rss_bytes() is None, "there is none"
    context = torch.multiprocessing.get_context("forkserver")
    ready, end = context.Queue(), context.Event()
    loaders = [context.Process(target=hold, args=(64, ready, end)) for _ in range(2)]
    for loader in loaders:
        loader.start()
    for _ in loaders:
        ready.get(timeout=PATIENCE_S)
    found = memory.read_loaders_rss_bytes()
    largest = memory.read_peak_rss_bytes()
    end.set()
    for loader in loaders:
        loader.join()
    assert found is not None
    assert 2 * 64 * 2**20 < found < 2 * 64 * 2**20 + 3 * largest, "both, and the server that they come from"
    assert memory.read_loaders_rss_bytes() is None, "those that have ended are no more"


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB", 5 * 2**29),
        ("CUDA out of memory. Tried to allocate 512.00 MiB", 2**29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12884901888 bytes. Error", 12 * GIB),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes.", 64),
        ("CUDA error: out of memory", None),
    ],
)
def test_requested_bytes_are_read_from_the_allocator_message(message: str, asked: int | None) -> None:
    assert memory.parse_requested_bytes(message) == asked


@pytest.mark.parametrize(
    ("limit", "free", "total"),
    [(None, 6 * GIB, 8 * GIB), (5 * GIB, GIB, 5 * GIB), (9 * GIB, 5 * GIB, 9 * GIB), (100 * GIB, 6 * GIB, 8 * GIB)],
)
def test_free_host_memory_is_that_of_the_tightest_limit(
    limit: int | None, free: int, total: int, tmp_path: Path
) -> None:
    """The host has 8 GiB, of which 6 GiB are available. The process is in a control group that has used 4 GiB of its
    `limit`. The free memory is the smaller of two values: 6 GiB, or `limit` minus 4 GiB."""
    group = tmp_path / "sys/fs/cgroup/job"
    (tmp_path / "proc/self").mkdir(parents=True)
    group.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 * 2**20} kB\nMemAvailable: {6 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/self/status").write_text("VmRSS: 2048 kB\n")
    (group / "memory.current").write_text(f"{4 * GIB}\n")
    (group / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
    error = RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {7 * GIB} bytes.")
    found = memory.read_host_shortage(3, CPU, error, tmp_path)
    assert (found.free_bytes, found.total_bytes, found.requested_bytes) == (free, total, 7 * GIB)
    assert (found.lacking_bytes, found.resident_bytes) == (7 * GIB - free, 2 * 2**20)
    assert f"host memory: 7 GiB requested, {7 - free / GIB:.3g} lacking" in describe_shortage(found)
