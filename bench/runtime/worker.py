"""Program of every rank: read spec.json, build the model, train and measure, and write the result files.

A supervisor starts `python -m bench.runtime.worker FOLDER`. torch is not imported at the top of this module but later,
in the timed phase `imports`. The time of the import is then measured, and a failure of the import is reported.
"""

import contextlib
import functools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from bench import data, engines, models
from bench.core import store
from bench.core.engine_facts import list_stages
from bench.core.engine_facts import place as find_place
from bench.core.job_environment import read_job
from bench.core.network import count_part_elements
from bench.core.processes import importing
from bench.core.record import Circumstance, MemoryShortage, Observations, OutcomeKind, RunRecord
from bench.core.scheduling import JobContext
from bench.core.spec import AdapterSpec, RunSpec, config_id
from bench.measure import devices, environment
from bench.measure.channel import STARTED_AT, Channel
from bench.measure.failures import InjectedFault, Refused
from bench.models.checkpoint import fetch_once
from bench.runtime import extensions

if TYPE_CHECKING:
    from bench.measure.loop import Series
    from bench.measure.observe import Inspection
    from bench.measure.training import Training


def main() -> None:
    """Run one rank of the attempt in the folder given on the command line. Report a failure to the supervisor."""
    channel = Channel.open()
    status, rank = 0, None
    try:
        rank = RankWorker(Path(sys.argv[1]), channel)
        rank.measure()
    except BaseException as error:
        channel.fail(error, rank.find_shortage if rank else lambda kind, error: None)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # All files are written. A normal exit would wait for DataLoader processes, and for ranks that may be lost.
    os._exit(status)


class RankWorker:
    """Process of one rank in one attempt (one try at a run)."""

    def __init__(self, folder: Path, channel: Channel) -> None:
        self.folder, self.channel = folder, channel
        self.spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        self.circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self.rehearses = self.circumstance.rehearsed_rank is not None
        # A rehearsal by shapes runs on a CPU, also if its machine has GPUs.
        self.imitates_gpu = self.circumstance.shapes_only and self.circumstance.machine.device == "cuda"
        self.learns = self.spec.learning.tokens is not None and not self.rehearses
        self.training: Training | None = None
        self.drill = InjectedFault.read_environment()
        self.injected_at = -1  # step
        self.recorded = False
        self.phases_s = {"start": time.time() - float(os.environ.get(STARTED_AT, time.time()))}

    def measure(self) -> None:
        """Execute all phases of the attempt, from joining the other ranks to writing the record."""
        self.join()
        from bench.measure import shapes

        skip = (
            functools.partial(shapes.leave_out, imitates_gpu=self.imitates_gpu)
            if self.circumstance.shapes_only else contextlib.nullcontext[None]
        )  # fmt: skip
        with skip():
            self.build()
            series = self.train()
        inspects = series.stopped != "invalid" and self.spec.measure.inspect
        # The record is written before the inspection, so that it is not lost if the inspection fails.
        self.report(series, None, store.UNINSPECTED if inspects else None)
        if inspects:
            with skip():
                seen = self.inspect()
            self.report(series, seen, None)
        if self.training and self.peers.is_main:
            from bench.measure import checkpoints

            # Only a training with `stop_after` keeps its last checkpoint, for a run that continues it.
            last = checkpoints.find_latest(self.folder) if self.spec.learning.stop_after else None
            checkpoints.remove_all(self.folder, self.circumstance.goes_on_from, but=last.folder if last else None)

    def join(self) -> None:
        """Select the device, form the process group, and measure the link between the ranks."""
        with self.phase("imports"), importing():
            import torch

            from bench.measure import link, memory, peers
            from bench.measure.surroundings import Surroundings

            self.peers = peers.Peers() if self.rehearses else peers.ProcessGroupPeers()
            devices = 1 if self.rehearses else self.spec.devices_per_node
            if self.circumstance.shapes_only:
                self.device = torch.device("cpu")
            else:
                self.device = environment.find_device(self.circumstance.machine, devices, self.local_rank)
            self.device_name = environment.read_driver_name(self.device)
            # Otherwise DeepSpeed guesses the accelerator from the installed packages.
            os.environ["DS_ACCELERATOR"] = self.device.type
            memory.install_counter(self.device, imitates_gpu=self.imitates_gpu)
            self.engine_builder = engines.load_builder(self.spec.engine.backend)
            self.family = models.load_builder(self.spec.model.family)
        with self.phase("rendezvous"):
            self.rendezvous()
            self.describe_environment()
            node = self.rank // self.spec.devices_per_node
            watches = self.local_rank == 0 or self.rehearses
            self.surroundings = Surroundings(self.rank, node, self.device_name, self.peers, watches_node=watches)
        if (within_s := self.circumstance.limits.quiet_within_s) is not None:
            with self.phase("quiet"):
                self.surroundings.wait_until_quiet(within_s, self.peers, lambda: self.channel.beat("quiet"))
        with self.phase("link"):
            self.link = None if self.rehearses else link.measure_link(self.device, self.spec)
            if self.link and self.spec.nodes > 1:
                link.check_link(self.link, self.circumstance.network, self.circumstance.machine)

    def build(self) -> None:
        """Open the data, build the model and its engine, and check the number of parameters."""
        import torch

        from bench.measure import checkpoints, memory, training

        spec = self.spec
        with self.phase("data"):
            self.open_data()
        self.load_operations()
        checkpoint: Path | None = None
        if spec.model.checkpoint is not None and not self.rehearses:  # a rehearsal has random weights
            with self.phase("hub"):
                checkpoint = fetch_once(spec.model.checkpoint, self.local_rank == 0, self.peers.barrier)
        memory.reset_peak(self.device)
        with self.phase("model"):
            module = self.build_module()
            self.parameters = self.check_parameters(module)
            if checkpoint is None:
                self.family.initialise(module, spec, self.engine_builder.whole)
        if checkpoint is not None:
            from bench.models.checkpoint.tensors import load_weights

            with self.phase("weights"):
                load_weights(module, spec, self.engine_builder.whole, checkpoint, is_main=self.peers.is_main)
        with self.phase("engine"):
            self.adapt(module)
            if self.drill:
                self.drill.attach(self.rank, module)
            here = self.engine_builder.parameter_count(module.parameters())
            self.engine = self.engine_builder.build(module, spec)
            engines.check_members(self.engine, spec)
        self.initialisation = memory.read_peaks(self.device)
        # From here on, only dropout is random. It depends on the seed and the rank, and is the same in each repeat.
        torch.manual_seed(models.derived_seed(spec.seed, f"rank {self.rank}"))
        if self.learns:
            known = self.data_facts, spec.model.checkpoint, checkpoint
            inputs = self.peers.broadcast(checkpoints.hash_inputs(*known) if self.peers.is_main else {})
            self.training = training.Training(
                spec, self.engine, self.held_out, self.folder, self.device, self.channel.beat, self.prompts, inputs
            )
            if self.saved:
                with self.phase("checkpoint"):
                    self.training.resume(self.saved)
        if (kept := self.engine_builder.parameter_count(module.parameters())) != here:
            raise Refused(f"{spec.model.name} has {kept} parameters in its engine where {here} were built")
        self.initialisation_rss = memory.read_peak_rss_bytes()
        self.device_peak_bytes = memory.sample_device_peak(self.device)

    def adapt(self, module: Any) -> None:
        """Add adapters (such as LoRA) to the initialised model or freeze some of its parameters, as the spec says. Then
        count all parameters and the trained parameters."""
        from bench.models.modules.adapters import adapt

        count = self.engine_builder.parameter_count
        if self.spec.adapter != AdapterSpec():
            adapt(module, self.spec, self.engine_builder)
        trained = int(count(engines.trained(module)))
        if self.spec.adapter.rank is not None:  # quantised weights now have fewer elements
            self.parameters += trained
            self.trainable_parameters = trained
        else:
            self.trainable_parameters = self.parameters - int(count(module.parameters())) + trained

    def load_operations(self) -> None:
        """Load the engine's compiled ops, such as DeepSpeed's CPUAdam. Missing ops are built first.

        Otherwise the engine would build missing ops itself. The engine would wait forever if an earlier build was
        killed, and the initialisation time of the engine would include the build.
        """
        if not (names := engines.facts(self.spec).compiled_ops) or not (folder := os.environ.get(extensions.FOLDER)):
            return
        with self.phase("ops"):
            # The first rank of a node builds the ops for all ranks of the node.
            for is_turn in (self.local_rank == 0, self.local_rank != 0):
                for name in names if is_turn else ():
                    extensions.load(name, self.device.type, Path(folder))
                self.peers.barrier()

    def open_data(self) -> None:
        """Open the data. A training that resumes from a checkpoint skips the batches used before the checkpoint."""
        spec, place = self.spec, find_place(self.spec, self.rank).data
        source = data.load(spec.data.source)
        if self.learns:
            from bench.measure import checkpoints

            before = self.circumstance.goes_on_from
            saved = checkpoints.find_latest(self.folder, before) if self.peers.is_main else None
            self.saved = self.peers.broadcast(saved)
            source = with_held_out = data.load_held_out(spec.data.source)
            self.held_out, self.prompts = with_held_out.held_out_batches(spec, place), None
            if spec.learning.quality:
                self.prompts = data.load_prompts(spec.data.source).held_out_prompts(spec, place)
            first = self.saved.steps * spec.accumulation if self.saved else 0
            batches = with_held_out.micro_batches(spec, place, first)
        else:
            batches = source.micro_batches(spec, place)
        self.batches = batches if self.circumstance.shapes_only else data.check_stream(batches, spec)
        self.data_facts = source.describe(spec) if self.peers.is_main else {}

    def build_module(self) -> Any:
        """Return the uninitialised model or, if the engine divides it into pipeline stages, the stages of this rank."""
        from bench.engines.distributed.executor import build_stages

        spec, cut = self.spec, engines.facts(self.spec).cut
        if cut is None:
            return self.family.build(spec, self.engine_builder.construction(spec))
        network, family = models.get_network(spec.model), models.load_divided_builder(spec.model.family)
        return build_stages(spec, self.rank, family, self.engine_builder, network, cut(spec, network))

    def train(self) -> "Series":
        """Run warm-up and measurement window, or a complete training. Return the times and losses of all steps."""
        from bench.measure import loop, memory, observe, shapes
        from bench.measure.clock import create_clock
        from bench.measure.collectives import wait_for
        from bench.measure.surroundings import Surrounded

        warmup: memory.PhasePeaks | None = None

        def open_window() -> None:
            nonlocal warmup
            self.device_peak_bytes = memory.sample_device_peak(self.device, self.device_peak_bytes)
            warmup = memory.read_peaks(self.device)
            memory.reset_peak(self.device)
            wait_for(self.device)
            self.surroundings.open()

        def sample() -> None:
            self.surroundings.sample()
            self.device_peak_bytes = memory.sample_device_peak(self.device, self.device_peak_bytes)

        # The peak of the initialisation is recorded separately.
        memory.reset_peak(self.device)
        clock = create_clock(self.device)
        with_loss = engines.facts(self.spec).loss_ranks
        self.trainer = loop.Trainer(
            self.spec, self.engine, self.batches, clock, self.device, self.position, self.peers,
            has_loss=with_loss is None or self.rank in with_loss,
            first=self.training.steps if self.training else 0,
            before_step=self.training.set_learning_rate if self.training else lambda step: None,
        )  # fmt: skip
        series = loop.Series(tuple(self.spec.sequence), None if self.rehearses else with_loss)
        with self.write_steps_if_terminated(series):
            if self.training:
                self.training.run(self.trainer, open_window, series, sample)
            else:
                protocol = shapes.PROTOCOL if self.circumstance.shapes_only else self.spec.measure
                limit_s = self.circumstance.step_limit_s
                loop.run(self.trainer, protocol, open_window, series, sample, limit_s)
        wait_for(self.device)
        self.device_peak_bytes = memory.sample_device_peak(self.device, self.device_peak_bytes)
        self.surrounded = self.surroundings.close() if warmup else Surrounded()
        self.devices_after = tuple(devices.read_states()) if self.device.type == "cuda" else ()
        self.memory = observe.build_rank_memory(
            self.rank, self.device, self.initialisation, self.initialisation_rss, warmup, self.device_peak_bytes
        )
        return series

    @contextlib.contextmanager
    def write_steps_if_terminated(self, series: "Series") -> Iterator[None]:
        """Context in which SIGTERM, for example from a scheduler, writes the steps so far and then ends the process."""
        from bench.measure import observe

        def write_and_end(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            # The series may be incomplete between two blocks.
            with contextlib.suppress(Exception):
                store.write_reserved(self.folder / store.STEPS, observe.write_steps_table(series))
            os.kill(os.getpid(), number)

        if self.peers.is_main:
            signal.signal(signal.SIGTERM, write_and_end)
        yield
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def find_shortage(self, kind: OutcomeKind, error: BaseException) -> MemoryShortage | None:
        """Return facts about the memory that ran out, such as its size. If `kind` is "oom", this is the device's
        memory, and otherwise the host's memory. None if the facts are unknown."""
        with contextlib.suppress(Exception):
            from bench.measure import memory

            if kind == "oom":
                background = self.surroundings.read_background_bytes()
                return memory.read_device_shortage(self.rank, self.device, error, background)
            return memory.read_host_shortage(self.rank, self.device, error)
        return None

    def inspect(self) -> "Inspection":
        """Make a few steps after the timed steps of the run. Return measurements of these steps and of collectives."""
        from bench.measure import observe

        self.channel.beat("inspection")
        members, unknown = engines.facts(self.spec).members, models.build_network(self.spec.model) is None
        return observe.inspect(self.trainer, self.engine, members, self.device, counts_flops=unknown)

    def report(self, series: "Series", seen: "Inspection | None", uninspected: str | None) -> None:
        """Gather the results of all ranks on rank 0. Rank 0 then writes the steps and the record. `seen` has the
        results of the inspection: counts and times of a few steps after the timed steps. If the inspection was not
        made, `seen` is None, and `uninspected` may have the reason."""
        from bench.measure import observe

        self.channel.beat("record")
        views = self.peers.gather(observe.RankView(self.memory, self.phases_s, seen, self.surrounded))
        if self.peers.is_main:
            observed = observe.build_observations(
                self.spec,
                series,
                views,
                self.training,
                parameters=self.parameters,
                trainable_parameters=self.trainable_parameters,
                uninspected=uninspected,
                engine_config=self.engine.config(),
                link=self.link,
                data=self.data_facts,
                drill=self.drill.text if self.drill else None,
            )
            if self.rehearses:
                observed = observe.drop_unknown(observed, computes=not self.circumstance.shapes_only)
            self.write(observed, series)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context that measures the time of a phase (a part of the run before its first step, such as `data`)."""
        self.channel.beat(name)
        begin = time.perf_counter()
        yield
        self.phases_s[name] = time.perf_counter() - begin

    def position(self, phase: str, step: int) -> None:
        """Report this rank's phase and step to the supervisor. Inject a fault if one is requested for this step."""
        self.channel.beat(phase, step)
        # A fault is injected at most once per step, when the first micro-batch of the step is fetched.
        if self.drill and phase == "fetch" and step > self.injected_at:
            self.injected_at = step
            self.drill.inject(self.rank, step)

    def rendezvous(self) -> None:
        """Form the process group. A rehearsal runs one rank alone, so its process group is fake."""
        import torch.distributed as dist

        from bench.measure import peers

        if self.rehearses:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.spec.world_size)
        else:
            timeout = peers.compute_timeout(self.circumstance.limits)
            peers.join(self.rank, self.spec.world_size, self.device, timeout)

    def describe_environment(self) -> None:
        """Write environment.json immediately, so that the environment is also known for a run that fails later.

        Raise Refused if the ranks are in different allocations, or in environments whose results may not be pooled.
        """
        import torch

        from bench.measure.peers import RankPlace, check_places

        job, host = read_job(os.environ) or JobContext(), socket.gethostname()
        position = {
            "rank": self.rank,
            "host": host,
            "affinity": sorted(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "device": self.device_name,
        }
        found = environment.classify(self.device.type, self.spec.devices_per_node, self.device_name)
        gathered = self.peers.gather((position, RankPlace(host, job.job_id, job.restart), found))
        if self.peers.is_main:
            ranks, places, classes = zip(*gathered, strict=True)
            hosts = tuple(dict.fromkeys(rank["host"] for rank in ranks))
            description = environment.probe(found, hosts, {"ranks": ranks}, job, self.spec)
            store.write_json(self.folder / store.ENVIRONMENT, description)
            self.environment = description
            check_places(places, job.nodelist)
            environment.check_alike(classes)

    def check_parameters(self, module: Any) -> int:
        """Return the number of parameters of the whole model, over all partitions and pipeline stages.

        Raise Refused if the model, or this rank's pipeline stages, have another number of parameters than expected.
        """
        expected = here = models.count_expected_parameters(self.spec.model)
        # If the engine divides the model into pipeline stages, only the parameters of this rank's stages are counted.
        if (cut := engines.facts(self.spec).cut) is not None:
            network = models.get_network(self.spec.model)
            mine = [cut(self.spec, network)[stage] for stage in list_stages(self.spec, self.rank)]
            here = count_part_elements(network, mine, self.spec.parallel.tensor)
        found = int(self.engine_builder.parameter_count(module.parameters()))
        if here is not None and found != here:
            raise Refused(f"{self.spec.model.name} has {found} parameters where {here} were expected")
        return found if expected is None else expected

    def write(self, observed: Observations, series: "Series") -> None:
        """Write the steps and then the record. The record is last, because an attempt with a record counts as complete.

        A second call replaces the record.
        """
        from bench.measure import observe

        with contextlib.suppress(OSError):  # on a full disk, the steps are lost; space for the record is reserved
            store.write_reserved(self.folder / store.STEPS, observe.write_steps_table(series))
        outcome = observe.build_outcome(series)
        # The fault is also stored in the outcome, which can be read without decoding the whole record.
        if self.drill:
            outcome = outcome.model_copy(update={"evidence": outcome.evidence | {"drill": self.drill.text}})
        record = RunRecord(
            config_id=config_id(self.spec),
            evidence="rehearsed" if self.rehearses else "measured",
            spec=self.spec,
            circumstance=self.circumstance,
            environment=self.environment.model_copy(update={"devices_after": self.devices_after}),
            outcome=outcome,
            observations=observed,
        )
        if self.recorded:
            store.write_json(self.folder / store.RECORD, record)
        else:
            self.recorded = store.write_reserved(self.folder / store.RECORD, store.to_json(record))


if __name__ == "__main__":
    main()
