"""Tests of single components on a GPU, such as its clock and its memory counters. Each measurement is compared with an
independent reference. Without a GPU, the tests are skipped."""

import os
import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from bench.config import compose
from bench.measure import devices, link, memory
from bench.measure.clock import DeviceClock, ReadBlock, create_clock
from bench.measure.collectives import CollectiveCounter, wait_for
from bench.measure.environment import classify, find_device, find_device_kind
from bench.measure.failures import Refused, classify_error
from bench.measure.loop import create_batch_copy
from bench.measure.peers import ProcessGroupPeers

REQUIRED = "ZEROSCALE_REQUIRE_CUDA" in os.environ
pytestmark = pytest.mark.skipif(not torch.cuda.is_available() and not REQUIRED, reason="no CUDA device")
GPU = torch.device("cuda", 0)
MIB = 2**20


def test_event_clock_agrees_with_a_waiting_host_without_blocking_it() -> None:
    clock = create_clock(GPU)
    assert isinstance(clock, DeviceClock)
    matrix = torch.randn(4096, 4096, device=GPU)

    def work() -> None:
        for _ in range(20):
            matrix @ matrix

    work()
    clock.drain()
    clock.begin()
    begin = time.perf_counter()
    for _ in range(5):
        work()
        clock.mark()
    launched = time.perf_counter() - begin
    step_s = clock.end()()
    waited = time.perf_counter() - begin
    assert len(step_s) == 5
    assert sum(step_s) == pytest.approx(waited, rel=0.05)
    assert launched < waited / 2


def test_events_of_a_block_are_read_during_the_next_block() -> None:
    clock, matrix = create_clock(GPU), torch.randn(4096, 4096, device=GPU)

    def launch() -> ReadBlock:
        clock.begin()
        for _ in range(5):
            for _ in range(20):
                matrix @ matrix
            clock.mark()
        return clock.end()

    launch()
    clock.drain()
    begin = time.perf_counter()
    first = launch()
    second = launch()
    step_s = first()
    assert not torch.cuda.current_stream(GPU).query(), "the second block is under way"
    step_s += second()
    assert sum(step_s) == pytest.approx(time.perf_counter() - begin, rel=0.05), "nothing lies between two blocks"


@pytest.mark.parametrize("pinned", [False, True])
def test_batches_are_copied_completely_before_their_use(pinned: bool) -> None:
    """Many batches are copied to the GPU in quick succession. Each batch is freed on the host and on the GPU as soon as
    its sum has been computed."""
    copy, busy = create_batch_copy(GPU, pinned=pinned), torch.randn(2048, 2048, device=GPU)
    sums = []
    for number in range(50):
        batch = copy({"input_ids": torch.full((64, 512), number, dtype=torch.int64)})
        busy @ busy
        sums.append(batch["input_ids"].sum())
    assert torch.stack(sums).tolist() == [number * 64 * 512 for number in range(50)]


def test_copies_from_page_locked_memory_do_not_block_the_host() -> None:
    copy, busy = create_batch_copy(GPU, pinned=True), torch.randn(8192, 8192, device=GPU)
    batch = {"input_ids": torch.ones(1024, 512, dtype=torch.int64).pin_memory()}
    copy(batch)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        busy @ busy
        copy(batch)
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert launched < (time.perf_counter() - begin) / 2


def test_peak_of_the_cuda_allocator_equals_a_hand_calculation() -> None:
    before = memory.read_live_bytes(GPU)
    memory.reset_peak(GPU)
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    passing = torch.empty(128 * MIB, dtype=torch.uint8, device=GPU)
    del passing
    after, (peak, reserved) = memory.read_live_bytes(GPU), memory.read_peaks(GPU)
    assert before is not None and after is not None and peak is not None
    assert after - before == kept.nbytes
    assert peak - before == 192 * MIB
    used = memory.read_device_used_bytes(GPU)
    assert reserved is not None and used is not None
    assert used >= reserved >= peak


def test_counted_bytes_equal_the_storages_reachable_from_python() -> None:
    live, reachable = memory.read_live_bytes(GPU), memory.count_reachable_bytes(GPU)
    tensors = [torch.empty(size * MIB, dtype=torch.uint8, device=GPU) for size in (1, 3, 5)]
    now, reached = memory.read_live_bytes(GPU), memory.count_reachable_bytes(GPU)
    assert live is not None and now is not None
    assert now - live == reached - reachable == sum(tensor.nbytes for tensor in tensors)


def test_driver_and_torch_identify_the_same_device() -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert devices.query(uuid, "name") == torch.cuda.get_device_name(0)
    assert devices.count_devices() >= torch.cuda.device_count()
    assert find_device_kind() == "cuda"
    free, whole = devices.query(0, "free_bytes"), torch.cuda.get_device_properties(0).total_memory
    assert free is not None
    assert 0.5 * whole <= free <= 1.1 * whole  # free memory, which is less than the total
    found = classify("cuda", 1)
    assert found.versions["cuda"] == torch.version.cuda
    assert found.versions["driver"] and found.versions["nccl"]
    for seen in devices.read_states():
        assert seen["name"] and seen["sm_clock_mhz"] and seen["power_cap_w"] and seen["temperature_c"] is not None


def test_energy_increases_while_the_device_computes() -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    before, begin = devices.query(uuid, "energy_j"), time.perf_counter()
    if before is None:
        pytest.skip("this device keeps no count of its energy")
    matrix = torch.randn(4096, 4096, device=GPU)
    while time.perf_counter() - begin < 1:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
    used, seconds = (devices.query(uuid, "energy_j") or 0) - before, time.perf_counter() - begin
    cap = devices.read_states()[0]["power_cap_w"] or float("inf")
    assert 20 < used / seconds < 1.2 * cap, "more than an idle card takes, and not more than it may"


@pytest.fixture
def alone() -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_group_of_one_rank_uses_nccl_for_device_tensors_and_gloo_for_the_harness() -> None:
    group = ProcessGroupPeers()
    group.barrier()
    assert (group.gather("here"), group.broadcast(3)) == (["here"], 3)
    (row,) = group.all_gather(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    assert row.tolist() == [[1.0, 2.0]]
    tensor = torch.ones(1000, device=GPU)
    with CollectiveCounter(lambda: wait_for(GPU)) as counter:
        dist.all_reduce(tensor)
    assert dict(counter.payload_bytes) == {"all_reduce": 4000}
    assert counter.inside_s > 0
    assert tensor.sum().item() == 1000
    found = link.measure_link(
        GPU, compose.compose_request(compose.parse_single(["model=tiny", "devices_per_node=1"])).spec
    )
    assert (found.backend, found.bus_bytes_per_s) == ("nccl", None)


def test_device_other_than_the_machines_is_refused() -> None:
    point = compose.compose_request(compose.parse_single(["model=tiny", "machine=v100_16", "devices_per_node=1"]))
    if point.machine.accepts(torch.cuda.get_device_name(0)):
        pytest.skip("this is the one")
    with pytest.raises(Refused, match="expects"):
        find_device(point.machine, 1, 0)
    with pytest.raises(Refused, match=r"devices_per_node=99, but this node has \d"):
        find_device(point.machine, 99, 0)


def test_exception_of_the_allocator_is_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=GPU)
    assert classify_error(caught.value)[0] == "oom"
    found = memory.read_device_shortage(0, GPU, caught.value, others_bytes=0)
    _, total = torch.cuda.mem_get_info(GPU)
    assert (found.where, found.requested_bytes, found.total_bytes) == ("device", 2**50, total)
    assert found.free_bytes is not None and found.lacking_bytes == 2**50 - found.free_bytes
    assert found.live_bytes is not None and found.live_bytes <= (found.reserved_bytes or 0) <= total
