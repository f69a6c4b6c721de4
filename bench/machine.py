"""Machine: what one node is, each number with its source. Unknown is None, and nothing is guessed from a name."""

from pydantic import Field

from bench.spec import Frozen, Name, Positive, Precision


class Machine(Frozen):
    """A node type of `conf/machine`. Peaks are dense (no sparsity), per device, in 10^12 FLOP/s."""

    name: Name
    device: str | None = None  # "cpu" or "cuda"; None takes what is there
    device_names: tuple[str, ...] = ()  # what the device may call itself; empty accepts any
    devices_per_node: Positive | None = None
    peak_tflops: dict[Precision, float] = {}
    unsupported: tuple[Precision, ...] = ()
    matmul_ceiling_tflops: dict[Precision, float] = {}  # best matmul seen, an upper bound closer than the peak
    memory_bytes: Positive | None = None  # per device
    memory_bytes_per_s: float | None = Field(None, gt=0)
    intra_node_bytes_per_s: float | None = Field(None, gt=0)  # one way, per device
    inter_node_bytes_per_s: float | None = Field(None, gt=0)  # one way, per node, all its network cards together
    nodes_share_processor: bool = False  # nodes that are namespaces of one machine: slurm/testbed
    power_w: float | None = Field(None, gt=0)  # board limit per device
    price_per_device_hour: float | None = Field(None, gt=0)  # the user's, in a currency of their own; never built in
    source: str = ""
    note: str = ""

    def accepts(self, device_name: str) -> bool:
        """Whether a device that calls itself `device_name` is this machine's."""
        return not self.device_names or device_name.lower() in map(str.lower, self.device_names)
