"""Options of launcher=vertex, the accelerators of each machine type, and the container image of the jobs. For the
image, this module has a Dockerfile and the commands that build and push the image. conf/launcher/vertex.yaml explains
every option."""

import difflib
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, model_validator

import bench
from bench.core import study_store
from bench.core.errors import UserError, suggest_nearest
from bench.core.formatting import format_count
from bench.core.scheduling import JobSetup, SchedulingOptions
from bench.core.spec import Positive, RunSpec

START_S = 120
"""Seconds added to a job's time limit, for the start of its container."""
DIGEST = "ZEROSCALE_CONTAINER_DIGEST"
"""Environment variable with the name of the job's container image. Because of this name, runs in different images count
as runs in different environments, and use different builds of DeepSpeed's ops."""
_FOLDER = "{folder}"
"""Placeholder in a command for the folder with the Dockerfile and the files that it copies."""
_DOCKERFILE = """\
# Image of the jobs of launcher=vertex. The folder also has the wheel of zeroscale, and what the study's points need.
FROM {base}
ENV DEBIAN_FRONTEND=noninteractive PATH=/opt/venv/bin:$PATH HF_HOME=/opt/cache/huggingface XDG_CACHE_HOME=/opt/cache
RUN apt-get update && apt-get install -y --no-install-recommends build-essential ca-certificates libaio-dev \\
    ninja-build python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
WORKDIR /opt/zeroscale
# Another index of torch's builds, such as that of its builds for processors: --build-arg TORCH_INDEX_URL=…
ARG TORCH_INDEX_URL=""
RUN pip install --no-cache-dir torch ${{TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}}
COPY zeroscale-*.whl ./
RUN pip install --no-cache-dir "$(ls zeroscale-*.whl)[run,adapters,vertex]"
ENV {digest}={image}
"""
# DeepSpeed compiles its ops with a CUDA toolkit of the same major version as that of torch.
_CUDA, _CPU = "nvidia/cuda:12.8.1-devel-ubuntu24.04", "ubuntu:24.04"
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_MANY = 500
"""Largest number of nodes of a run. A larger number is probably a typing error, and is refused."""


def _match(pattern: str, rule: str) -> AfterValidator:
    """Return a validator that refuses a text unless the whole text matches `pattern`. `rule` is the error message: why
    the text is refused, and what to write instead."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


_PROJECT = _match(
    r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|\d+",
    "is not a project ID or number; `gcloud projects list` lists your projects",
)
_REGION = _match(
    r"[a-z]+(?:-[a-z]+)+\d+", "is not a region; write for example us-central1, without the letter of a zone"
)
_IMAGE = _match(
    r"[\w.-]+(?::\d+)?(?:/[\w.-]+)+(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?",
    "is not an image in a registry; write HOST/PROJECT/REPOSITORY/NAME:TAG",
)
_ENDPOINT = _match(
    r"(?:[\w.-]+|\[[0-9a-f:]+\])(?::\d{1,5})?", "is not a host; write HOST or HOST:PORT, without https://"
)
_ACCOUNT = _match(
    r"[\w.+-]+@[\w.-]+\.\w+", "is not a service account; write its address, NAME@PROJECT.iam.gserviceaccount.com"
)
_LABEL = _match(
    r"(?!zeroscale-)[a-z][a-z0-9_-]{0,62}",
    "is not a name of a label; use lower-case letters, digits, '_' and '-', but not the beginning zeroscale-",
)
_LABEL_VALUE = _match(r"[a-z0-9_-]{0,63}", "is not a value of a label; use lower-case letters, digits, '_' and '-'")
_WORD = _match(r"[\w@./+-]+", "contains a character that is not allowed; use letters, digits, and any of ._-@/+")


class Options(SchedulingOptions):
    """Options in conf/launcher/vertex.yaml and in a site file."""

    has_dependencies: ClassVar[bool] = False
    setup_min: float = Field(15.0, ge=0)
    span: Literal["node"] = "node"  # Vertex AI starts one process per node
    mode: Literal["point", "packed"] = "packed"  # Vertex AI has no job arrays

    # where jobs run
    project: Annotated[str, _PROJECT] | None = None
    region: Annotated[str, _REGION] | None = None
    staging_bucket: str | None = Field(None, examples=["gs://my-bucket/zeroscale"])
    endpoint: Annotated[str, _ENDPOINT] | None = None

    # machines
    machine_type: Annotated[str, _WORD] | None = Field(None, examples=["a2-highgpu-8g"])
    accelerator_type: Annotated[str, _WORD] | None = Field(None, examples=["NVIDIA_TESLA_T4"])
    accelerators_per_node: Positive | None = None
    spot: bool = False
    boot_disk_gb: int = Field(200, ge=100, le=64000)

    # software that runs
    image: Annotated[str, _IMAGE] | None = None
    python: tuple[Annotated[str, _WORD], ...] = Field(("python3",), min_length=1)
    service_account: Annotated[str, _ACCOUNT] | None = None
    labels: dict[Annotated[str, _LABEL], Annotated[str, _LABEL_VALUE]] = Field({}, examples=[{"team": "research"}])

    # money
    price_per_node_hour: float | None = Field(None, gt=0)
    budget: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.throttle is not None:
            rule = "a Vertex AI job cannot wait for another job"
            raise ValueError(
                f"launcher.throttle={self.throttle}: {rule}; set launcher.max_queued, and run `zeroscale resume`"
            )
        if self.budget is not None and self.price_per_node_hour is None:
            rule = "the price of a node is unknown"
            remedy = "set launcher.price_per_node_hour; conf/machine has published prices"
            raise ValueError(f"launcher.budget={self.budget:g}: {rule}; {remedy}")
        self._check_bucket()
        return self

    def _check_bucket(self) -> None:
        bucket = self.staging_bucket
        # Tests use a folder of this machine instead of a bucket.
        schemes = ("gs", "file") if self.is_local else ("gs",)
        if bucket is None:
            return
        parts = urlsplit(bucket)
        # https://cloud.google.com/storage/docs/buckets#naming
        named = parts.scheme != "gs" or re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", parts.netloc)
        if parts.scheme not in schemes or not named or not re.fullmatch(r"[\w:/.-]+", bucket):
            raise ValueError(
                f"launcher.staging_bucket={bucket}: is not a bucket; write gs://BUCKET or gs://BUCKET/FOLDER"
            )

    @property
    def is_local(self) -> bool:
        """True if the endpoint is on this machine, as in tests. It is then reached without encryption."""
        return self.endpoint is not None and re.sub(r":\d+$", "", self.endpoint) in _LOCAL


class Site(NamedTuple):
    """Values of the options that every job needs."""

    project: str
    region: str
    bucket: str
    machine_type: str
    image: str

    @property
    def parent(self) -> str:
        """Resource name of the project and region in which the jobs run, as in requests to the service."""
        return f"projects/{self.project}/locations/{self.region}"


_REMEDIES = {
    "project": "set launcher.project=MY_PROJECT; `gcloud projects list` lists your projects",
    "region": "set launcher.region=us-central1 or another region",
    "staging_bucket": "set launcher.staging_bucket=gs://MY_BUCKET; `gcloud storage buckets list` lists your buckets",
    "machine_type": "set launcher.machine_type=a2-highgpu-8g or another machine type",
    "image": "set launcher.image=HOST/PROJECT/REPOSITORY/NAME:TAG; `zeroscale prepare` writes its Dockerfile",
}


def find_site(options: Options) -> Site:
    """Return the values of the options that every job needs. Raise UserError if one of these options is not set."""
    values: dict[str, str] = {}
    for name, remedy in _REMEDIES.items():
        value = getattr(options, name)
        if value is None:
            raise UserError(f"launcher.{name}=null", "launcher=vertex needs this key", remedy)
        values[name] = value.rstrip("/")
    return Site(*values.values())


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if a run of `spec` cannot be started with these options."""
    site = find_site(options)
    study_store.check_spec(spec)
    host = options.network.rendezvous_host
    if "{host}" not in host:
        rule = "names of nodes are unknown before the job starts"
        raise UserError(f"launcher.network.rendezvous_host={host}", rule, "write {host} in place of the node's name")
    if spec.nodes > _MANY:
        raise UserError(f"nodes={spec.nodes}", f"launcher=vertex supports at most {_MANY} nodes", "use fewer nodes")
    kind, count = find_accelerators(options, site.machine_type, spec.devices_per_node)
    if kind is not None and count < spec.devices_per_node:
        given = f"launcher.accelerators_per_node={count}"
        rule = f"must be at least devices_per_node={spec.devices_per_node}"
        raise UserError(given, rule, f"set {spec.devices_per_node}")


def find_accelerators(options: Options, machine_type: str, devices_per_node: int) -> tuple[str | None, int]:
    """Return the type and number of accelerators of each machine; (None, 0) without accelerators.

    If the options do not set the number of accelerators, it is `devices_per_node`. Raise UserError if the machine type
    cannot have these accelerators.
    """
    table = _read_machine_types()
    fixed: Mapping[str, int] = table["fixed"].get(machine_type, {})
    own_kind, own_count = next(iter(fixed.items()), (None, 0))
    kind = options.accelerator_type or own_kind
    if kind is None:
        if options.accelerators_per_node is not None:
            given = f"launcher.accelerators_per_node={options.accelerators_per_node}"
            raise UserError(given, "needs launcher.accelerator_type", "set launcher.accelerator_type")
        return None, 0
    count = options.accelerators_per_node or devices_per_node
    given = f"launcher.accelerator_type={kind}"
    if own_kind is not None:
        if kind != own_kind:
            raise UserError(given, f"machine type {machine_type} has {own_kind}", "remove launcher.accelerator_type")
        if count != own_count:
            had = format_count(own_count, "accelerator")
            rule = f"machine type {machine_type} has {had}, but {count} are requested"
            raise UserError(f"launcher.machine_type={machine_type}", rule, _find_remedy(table, kind, count, own_count))
        return kind, count
    family, cores = machine_type.partition("-")[0], machine_type.rpartition("-")[2]
    if family in table["without"]:
        rule = f"machine type {machine_type} supports no GPUs"
        raise UserError(given, rule, "choose an n1, g2, a2 or a3 machine type")
    if family == "n1":
        _check_attached(table["attached_to_n1"], machine_type, int(cores) if cores.isdigit() else 0, kind, count)
    return kind, count


def _find_remedy(table: Mapping[str, Any], kind: str, count: int, own_count: int) -> str:
    """Return the remedy for a wrong number of accelerators: the run requests `count` accelerators of the type `kind`,
    but the machine type has `own_count`."""
    others = [name for name, found in table["fixed"].items() if found.get(kind) == count]
    if others:
        return f"set launcher.machine_type={others[0]}"
    return f"set launcher.accelerators_per_node={own_count}" if own_count > count else "use fewer devices per node"


def _check_attached(
    table: Mapping[str, Mapping[int, int]], machine_type: str, cores: int, kind: str, count: int
) -> None:
    """Raise UserError if a machine of the family n1 cannot have `count` accelerators of the type `kind`. `cores` is the
    machine's number of cores.

    `table` has the largest number of cores for each type and number of accelerators. For example, `{"NVIDIA_TESLA_P4":
    {1: 24, 2: 48}}` means that a machine with two P4 has at most 48 cores.
    """
    if kind not in table:
        remedy = suggest_nearest(kind, list(table), f"choose one of {', '.join(table)}")
        raise UserError(f"launcher.accelerator_type={kind}", f"machine type {machine_type} does not support it", remedy)
    counts = [number for number, limit in table[kind].items() if cores <= limit]
    if count not in counts:
        numbers = " or ".join(map(str, counts))
        rule = f"machine type {machine_type} supports {numbers} {kind}, but {count} are requested"
        raise UserError(f"launcher.machine_type={machine_type}", rule, "change launcher.accelerators_per_node")


@functools.cache
def _read_machine_types() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "machine_types.yaml").read_text())
    return table


def job_setup(options: Options) -> JobSetup:
    """Return the properties of a job: device kind, container image, Python command, price, and the commands that build
    the image."""
    fixed = _read_machine_types()["fixed"].get(options.machine_type or "", {})
    has_gpu, image = bool(options.accelerator_type or fixed), options.image or ""
    return JobSetup(
        device="cuda" if has_gpu else "cpu",
        device_name=_read_machine_types()["device_names"].get(options.accelerator_type or next(iter(fixed), ""), ""),
        gpu_note=_describe_unknown_type(options.machine_type or ""),
        gpu_override=_suggest_gpu(options.machine_type or ""),
        image=options.image,
        python=options.python,
        variables={DIGEST: image} if image else {},
        lacks=_find_missing_package(),
        start_min=START_S / 60,
        price_per_node_hour=options.price_per_node_hour,
        price_note=_describe_spot_price(options) if options.spot else "",
        budget=options.budget,
        dockerfile=_DOCKERFILE.format(base=_CUDA if has_gpu else _CPU, digest=DIGEST, image=image),
        build=list_commands(image),
    )


def _describe_spot_price(options: Options) -> str:
    """Return a note on the price of Spot machines, which differs from the on-demand price."""
    price = options.price_per_node_hour
    rule = f"costs use launcher.price_per_node_hour={price:g}, as for other machines" if price else "costs are unknown"
    remedy = f"set {'it' if price else 'launcher.price_per_node_hour'} to the price of a Spot machine"
    return f"launcher.spot=true: {rule}; {remedy} (`zeroscale explain {options.machine_type}` shows published prices)"


@functools.cache  # called for every point of a study
def _find_missing_package() -> str:
    """Return a text that names a missing package of zeroscale's extra `vertex`, and the command that installs the
    package. The text is empty if no package is missing."""
    for package, module in (("google-cloud-aiplatform", "google.cloud.aiplatform_v1"), ("gcsfs", "gcsfs")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # a parent of the module
            found = None
        if found is None:
            return f"needs the package {package}, which is not installed; pip install 'zeroscale[vertex]'"
    return ""


def _describe_unknown_type(machine_type: str) -> str:
    """Return a text if the list of machine types does not have this type; empty if it does."""
    table, family = _read_machine_types(), machine_type.partition("-")[0]
    is_known = machine_type in table["fixed"] or family in ("", "n1", *table["without"])
    return "" if is_known else f"machine type {machine_type} is unknown"


def _suggest_gpu(machine_type: str) -> str:
    """Return an option with which jobs get GPUs. For a machine type of the family n1, the option attaches a GPU.
    Otherwise the option selects a similar machine type with GPUs."""
    if machine_type.startswith("n1-"):
        return "launcher.accelerator_type=NVIDIA_TESLA_T4"
    near = difflib.get_close_matches(machine_type, _read_machine_types()["fixed"], n=1)
    return f"launcher.machine_type={near[0] if near else 'a2-highgpu-1g'}"


def list_commands(image: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that make the wheel of zeroscale, and build and push the image."""
    source = Path(bench.__path__[0]).parent
    wheel = ("pip", "wheel", "--no-deps", "--wheel-dir", _FOLDER, str(source))
    return (
        # Without a checkout there is no source. The wheel that was installed must then be copied into the folder.
        *((wheel,) if (source / "pyproject.toml").exists() else ()),
        ("docker", "build", "--tag", image, _FOLDER),
        ("gcloud", "auth", "configure-docker", image.partition("/")[0]),
        ("docker", "push", image),
    )
