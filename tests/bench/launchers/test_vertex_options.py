"""Tests of launcher=vertex without Google's service: options, error messages for wrong values, and the request that
submits a job."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.cli import main
from bench.config import compose
from bench.core import plugins
from bench.core.errors import UserError
from bench.core.scheduling import Work
from bench.launchers.vertex import Options, check, find_log, job_setup, plan
from bench.launchers.vertex import options as vertex_options
from bench.sweep import inputs

ROOT = Path(__file__).parents[3]
STUDY = Path("/home/me/results/paper")
FOLDER = STUDY / "jobs/paper-1121-a1b2c3"
SITE = (
    "launcher=vertex", "launcher.project=my-project", "launcher.region=us-central1", "machine=cpu",
    "launcher.staging_bucket=gs://my-bucket/runs/", "launcher.image=registry.example.com/my-project/r/zeroscale:1",
    "devices_per_node=2",
)  # fmt: skip
N1 = (*SITE, "launcher.machine_type=n1-standard-16")


def compose_and_check(*overrides: str) -> compose.Request:
    request = compose.compose_request(compose.parse_single(overrides))
    compose.check(request, inputs.find_device(request))
    return request


def options(*overrides: str) -> Options:
    found = compose_and_check(*(overrides or N1)).launcher_options
    assert isinstance(found, Options)
    return found


def request(chosen: Options, **changes: Any) -> dict[str, Any]:
    """Return the request that submits a job on two nodes with two devices each. `chosen` are options of the launcher,
    and `changes` replace fields of the job's `Work`."""
    work = Work(FOLDER.name, FOLDER, "bench.sweep.allocation", (str(FOLDER),), 2, 2, time_limit_min=90)
    (text,) = plan(work._replace(**changes), chosen).files.values()
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_request_has_one_machine_in_the_first_pool_and_the_others_in_the_second() -> None:
    spec = request(options())
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == ["1", "1"]
    assert [pool["replicaCount"] for pool in request(options(), nodes=5)["workerPoolSpecs"]] == ["1", "4"]
    assert [pool["replicaCount"] for pool in request(options(), nodes=1)["workerPoolSpecs"]] == ["1"]
    first, second = (dict(pool, replicaCount="") for pool in spec["workerPoolSpecs"])
    assert first == second


def test_every_node_reads_its_job_from_the_store() -> None:
    container = request(options())["workerPoolSpecs"][1]["containerSpec"]
    assert container["command"] + container["args"] == [
        "python3", "-P", "-m", "bench.sweep.allocation", "--store", "gs://my-bucket/runs/paper",
        "--work", "/tmp/zeroscale", "paper-1121-a1b2c3",
    ]  # fmt: skip
    assert container["env"] == [{"name": "ZEROSCALE_CONTAINER_DIGEST", "value": container["imageUri"]}]
    assert container["imageUri"] == "registry.example.com/my-project/r/zeroscale:1"


def test_time_limit_and_spot_are_part_of_the_schedule() -> None:
    assert request(options())["scheduling"] == {"disableRetries": True, "strategy": "STANDARD", "timeout": "5520s"}
    assert request(options(*N1, "launcher.spot=true"))["scheduling"]["strategy"] == "SPOT"
    # Without any time limit, the service's default of seven days applies.
    assert "timeout" not in request(options(), time_limit_min=None)["scheduling"]


def test_accelerators_are_those_of_the_machine_type_one_for_each_device() -> None:
    assert "acceleratorType" not in request(options())["workerPoolSpecs"][0]["machineSpec"]
    g2 = options(*SITE, "launcher.machine_type=g2-standard-24")
    assert request(g2)["workerPoolSpecs"][0]["machineSpec"] == {
        "machineType": "g2-standard-24", "acceleratorType": "NVIDIA_L4", "acceleratorCount": 2,
    }  # fmt: skip
    t4 = options(*N1, "launcher.accelerator_type=NVIDIA_TESLA_T4")
    assert request(t4)["workerPoolSpecs"][0]["machineSpec"]["acceleratorCount"] == 2
    assert [job_setup(chosen).device for chosen in (options(), g2, t4)] == ["cpu", "cuda", "cuda"]


def test_the_command_of_a_plan_submits_the_request_by_hand() -> None:
    work = Work(FOLDER.name, FOLDER, "bench.sweep.allocation", (), 2, 2, time_limit_min=90)
    launch = plan(work, options(*N1, "launcher.price_per_node_hour=2.5", "launcher.labels={team: research}"))
    assert launch.command[:6] == (
        "gcloud", "ai", "custom-jobs", "create", "--project=my-project", "--region=us-central1",
    )  # fmt: skip
    assert "--display-name=paper-1121-a1b2c3" in launch.command
    (path,) = launch.files
    assert f"--config={path}" in launch.command and path.parent == FOLDER
    (labels,) = (word for word in launch.command if word.startswith("--labels="))
    found = dict(pair.split("=") for pair in labels.removeprefix("--labels=").split(","))
    assert found.pop("zeroscale-study").startswith("paper-")
    assert found == {
        "team": "research", "zeroscale-job": "paper-1121-a1b2c3", "zeroscale-thousandths-per-hour": "5000",
    }  # fmt: skip
    assert all(re.fullmatch(r"[a-z0-9_-]{1,63}", value) for value in found.values())


def test_labels_of_two_stores_and_of_long_names_differ() -> None:
    labels = set()
    for bucket in ("gs://one", "gs://two"):
        for study in ("a" * 60 + "B", "a" * 60 + "C"):
            folder = Path("/r") / study / "jobs" / "j"
            work = Work("j", folder, "bench.sweep.allocation", (), 1, 2)
            chosen = options(*N1, f"launcher.staging_bucket={bucket}")
            labels |= {word for word in plan(work, chosen).command if word.startswith("--labels=")}
    assert len(labels) == 4


def test_other_work_runs_its_own_command() -> None:
    spec = request(options(), module="bench.cli", arguments=("prepare", "--offline"), nodes=1)
    assert spec["workerPoolSpecs"][0]["containerSpec"]["args"] == ["-P", "-m", "bench.cli", "prepare", "--offline"]


def test_a_job_that_waits_for_another_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--autopilot: a Vertex AI job cannot wait for another job; remove it"):
        request(options(), after=("projects/p/locations/r/customJobs/1",))


def test_an_autopilot_is_refused_before_anything_is_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", *N1, "--autopilot", "--dry-run"]) == 2
    told = "--autopilot: jobs of launcher=vertex cannot wait for other jobs; remove it, and run `zeroscale resume`"
    assert told in capsys.readouterr().err


def test_a_dry_run_shows_the_cost_of_all_jobs_until_their_time_limits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("launcher.price_per_node_hour=6", "launcher.time_limit_min=27", "nodes=2", "launcher.warning_s=60")
    assert main(["sweep", *N1, *words, "--dry-run"]) == 0
    # A job gets 27 minutes for its point, 1 for the warning, 2 for its start and end, and 2 for its container.
    told = "1 point in 1 job, 1.1 node-hours, at a cost of 6.40, if all of them use their whole time limit"
    assert told in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_shows_the_predicted_cost_the_budget_and_jobs_that_exceed_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    site = (*(word for word in SITE if word != "machine=cpu"), "machine=a100_40", "launcher.machine_type=a2-highgpu-2g")
    words = ("launcher.time_limit_min=27", "batch.micro=1,2", "engine=ddp", "model=gpt2", "launcher.job_max_min=40")

    def dry_run(*more: str) -> str:
        assert main(["sweep", *site, *words, "launcher.price_per_node_hour=6", *more, "--dry-run"]) == 0
        return " ".join(capsys.readouterr().out.split())

    text = dry_run("launcher.budget=3.1")
    assert "2 points in 2 jobs, 1.1 node-hours, at a cost of 6.40 (budget: 3.10), if all of them" in text
    (low, high), costs = re.findall(r"([\d.]+)–([\d.]+)", text.partition("predicted: ")[2])[:2]
    assert [float(cost) / 6 for cost in costs] == pytest.approx([float(low), float(high)], rel=0.01)
    assert (
        "launcher.budget=3.1: 2 jobs may cost more than the whole budget, and will be refused; lower"
        " launcher.time_limit_min, or raise the budget"
    ) in text
    assert "lower launcher.job_max_min" in dry_run("launcher.budget=5", "launcher.job_max_min=240")
    text = dry_run("launcher.budget=3.3", "launcher.job_max_min=29")
    assert "than the whole budget" not in text
    assert "launcher.job_max_min=29: a single point may need a job of 30 min; raise job_max_min" in text


def test_the_log_of_a_job_is_that_of_its_first_node() -> None:
    assert find_log(FOLDER, "projects/p/locations/r/customJobs/1", None) == FOLDER / "job.log"


def test_the_launcher_is_complete() -> None:
    found = plugins.load_queueing("vertex")
    assert found and not found.ARRAYS and isinstance(found, plugins.StoringLauncherPlugin)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "launcher.machine_type=null: launcher=vertex needs this key; set launcher.machine_type=a2-highgpu-8g"),
        (("machine_type=n1-standard-8", "project=null"), "launcher.project=null: launcher=vertex needs this key; "),
        (("project=My_Project",), "launcher.project=My_Project: is not a project ID or number; `gcloud projects list`"),
        (("region=us-central1-a",), "launcher.region=us-central1-a: is not a region; "),
        (("staging_bucket=/scratch",), "launcher.staging_bucket=/scratch: is not a bucket; write gs://BUCKET"),
        (("service_account=me",), "launcher.service_account=me: is not a service account; write its address"),
        (("staging_bucket=s3://b",), "launcher.staging_bucket=s3://b: is not a bucket; write gs://BUCKET"),
        (("staging_bucket=file:///tmp/b",), "launcher.staging_bucket=file:///tmp/b: is not a bucket"),
        (("staging_bucket=gs://",), "launcher.staging_bucket=gs://: is not a bucket; write gs://BUCKET"),
        (("staging_bucket=gs://My_Bucket",), "launcher.staging_bucket=gs://My_Bucket: is not a bucket; write gs://BUCKET"),
        (("warning_s=100000",), "warning_s=100000: is longer than a packed job (job_max_min=240); lower warning_s"),
        (("machine_type=n1-standard-8", "network.rendezvous_host=foo"),
         "launcher.network.rendezvous_host=foo: names of nodes are unknown before the job starts; write {host}"),
        (("image=zeroscale",), "launcher.image=zeroscale: is not an image in a registry; write HOST/PROJECT"),
        (("endpoint='https://localhost:1'",), "launcher.endpoint=https://localhost:1: is not a host; write HOST"),
        (("throttle=2",), "launcher.throttle=2: a Vertex AI job cannot wait for another job; set launcher.max_queued"),
        (("span=device",), "launcher.span=device: must be one of node; set launcher.span=node"),
        (("budget=10",), "launcher.budget=10: the price of a node is unknown; set launcher.price_per_node_hour"),
        (("price_per_node_hour=0",), "launcher.price_per_node_hour=0: must be a number > 0"),
        (("labels={Team: a}",), "is not a name of a label; use lower-case letters"),
        (("labels={zeroscale-job: a}",), "is not a name of a label; use lower-case letters"),
        (("labels={team: A}",), "launcher.labels.team=A: is not a value of a label"),
        (("machine_type=n1-standard-8", "mode=array"),
         "launcher.mode=array: must be one of point, packed; set launcher.mode=point"),
        (("boot_disk_gb=10",), "launcher.boot_disk_gb=10: must be an integer ≥ 100, ≤ 64000"),
        (("machine_type=a2-highgpu-8g",), "machine type a2-highgpu-8g has 8 accelerators, but 2 are requested; "
         "set launcher.machine_type=a2-highgpu-2g"),
        (("machine_type=a4-highgpu-8g",), "but 2 are requested; set launcher.accelerators_per_node=8"),
        (("machine_type=g2-standard-4",), "has 1 accelerator, but 2 are requested; "
         "set launcher.machine_type=g2-standard-24"),
        (("machine_type=g2-standard-4", "accelerators_per_node=1"),
         "launcher.accelerators_per_node=1: must be at least devices_per_node=2; set 2"),
        (("machine_type=a2-highgpu-2g", "accelerator_type=NVIDIA_L4"),
         "launcher.accelerator_type=NVIDIA_L4: machine type a2-highgpu-2g has NVIDIA_TESLA_A100"),
        (("machine_type=e2-standard-8", "accelerator_type=NVIDIA_L4"), "machine type e2-standard-8 supports no"),
        (("machine_type=n1-standard-8", "accelerator_type=NVIDIA_L4"),
         "launcher.accelerator_type=NVIDIA_L4: machine type n1-standard-8 does not support it; "),
        (("machine_type=n1-standard-32", "accelerator_type=NVIDIA_TESLA_V100"),
         "machine type n1-standard-32 supports 4 or 8 NVIDIA_TESLA_V100, but 2 are requested"),
        (("machine_type=n1-standard-8", "accelerators_per_node=2"), "needs launcher.accelerator_type"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_in_one_line(words: tuple[str, ...], told: str) -> None:
    keys = {word.partition("=")[0] for word in words}
    kept = [word for word in SITE if word.partition("=")[0].removeprefix("launcher.") not in keys]
    with pytest.raises(UserError) as refused:
        compose_and_check(*kept, *(f"launcher.{word}" for word in words))
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_a_machine_type_that_is_not_listed_is_left_to_the_service() -> None:
    new = options(*SITE, "launcher.machine_type=a9-highgpu-2g", "launcher.accelerator_type=NVIDIA_NEW")
    assert request(new)["workerPoolSpecs"][0]["machineSpec"]["acceleratorCount"] == 2


def test_a_checkpoint_that_another_run_needs_is_refused() -> None:
    spec = compose_and_check(*N1).spec
    stopped = spec.model_copy(update={"learning": spec.learning.model_copy(update={"stop_after": 2})})
    with pytest.raises(UserError, match=r"^learning.stop_after=2: checkpoints are not copied to the object store"):
        check(options(), stopped)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("launcher.spot=true",), "launcher.spot=true: costs are unknown; set launcher.price_per_node_hour to the"),
        (
            ("launcher.spot=true", "launcher.price_per_node_hour=4.5"),
            "launcher.spot=true: costs use launcher.price_per_node_hour=4.5, as for other machines; set it to the "
            "price of a Spot machine (`zeroscale explain a3-highgpu-1g` shows published prices)",
        ),
        (("launcher.price_per_node_hour=4.5",), ""),
        (
            ("machine=auto",),
            "machine=auto: its GPUs are unknown, so nothing is predicted; choose the file of the machine that the "
            "jobs get, e.g. machine=h100",
        ),
        (("machine=auto", "launcher.machine_type=g2-standard-12"), "e.g. machine=l4"),
    ],
)
def test_a_dry_run_doubts_the_price_of_spot_machines_and_an_undescribed_machine(
    more: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site = [word for word in SITE if word.partition("=")[0] not in ("machine", "devices_per_node")]
    words = dict(word.split("=", 1) for word in ("machine=h100", "launcher.machine_type=a3-highgpu-1g", *more))
    words["devices_per_node"] = "1"
    assert main(["sweep", *site, *(f"{key}={value}" for key, value in words.items()), "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert expected in text
    assert expected or not any(words in text for words in ("launcher.spot=true", "its GPUs are unknown"))


def test_a_gpu_machine_needs_accelerators() -> None:
    found = compose_and_check(*(word for word in N1 if word != "machine=cpu"), "machine=l4")
    with pytest.raises(UserError, match=r"request none; set launcher.accelerator_type=NVIDIA_TESLA_T4"):
        inputs.check_devices(found)


def test_an_unknown_machine_type_is_named() -> None:
    kept = [
        word for word in SITE if not word.startswith(("machine=", "launcher.machine_type=", "launcher.accelerator"))
    ]
    found = compose_and_check(*kept, "machine=a100_40", "launcher.machine_type=a2-highgpu-9g")
    with pytest.raises(UserError, match=r"request none: machine type a2-highgpu-9g is unknown; set launcher\."):
        inputs.check_devices(found)


@pytest.mark.parametrize(
    ("machine_type", "remedy"),
    [
        ("n1-standard-16", "launcher.accelerator_type=NVIDIA_TESLA_T4"),
        ("a2-highgpu-8", "launcher.machine_type=a2-highgpu-8g"),
        ("new-type", "launcher.machine_type=a2-highgpu-1g"),
    ],
)
def test_remedy_for_a_machine_without_gpus_fits_its_machine_type(machine_type: str, remedy: str) -> None:
    assert job_setup(Options(machine_type=machine_type)).gpu_override == remedy


@pytest.mark.parametrize(
    ("machine", "request_", "device"),
    [
        ("a100_40", ("machine_type=a3-highgpu-2g",), "NVIDIA H100 80GB HBM3"),
        ("h100", ("machine_type=n1-standard-16", "accelerator_type=NVIDIA_TESLA_T4"), "Tesla T4"),
        ("a100_40", ("machine_type=a2-highgpu-2g",), ""),
        ("h100", ("machine_type=a3-highgpu-2g",), ""),
    ],
)
def test_a_machine_with_other_devices_than_the_job_is_refused(
    machine: str, request_: tuple[str, ...], device: str
) -> None:
    kept = [word for word in SITE if word != "machine=cpu"]
    found = compose_and_check(*kept, f"machine={machine}", *(f"launcher.{word}" for word in request_))
    if not device:
        inputs.check_devices(found)
        return
    with pytest.raises(
        UserError, match=f"^machine={machine}: does not match: jobs of launcher=vertex get {device}; choose"
    ):
        inputs.check_devices(found)


def test_the_device_names_of_accelerators_are_those_of_machine_files() -> None:
    """A machine file lists Google's types of rented machines, such as a3-highgpu-8g. The device name of the
    accelerators in these types must be among the device names in the machine file."""
    for path in sorted((ROOT / "conf/machine").glob("*.yaml")):
        plain = yaml.safe_load(path.read_text())
        for offer in plain.get("rented", ()):
            if offer["provider"] == "gcp":
                setup = job_setup(Options(machine_type=offer["machine_type"]))
                assert setup.device_name in plain["device_names"], offer["machine_type"]


def test_defaults_are_those_of_the_file() -> None:
    """The reference page and `explain` print the defaults of the options class. A run uses the values in
    conf/launcher/vertex.yaml. Both must be equal."""
    plain = yaml.safe_load((ROOT / "conf/launcher/vertex.yaml").read_text())
    assert plain.pop("name") == "vertex"
    assert Options.model_validate(plain) == Options()


@pytest.mark.parametrize(
    ("module", "package"), [("google.cloud.aiplatform_v1", "google-cloud-aiplatform"), ("gcsfs", "gcsfs")]
)
def test_a_dry_run_names_a_package_that_is_not_installed(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = f"launcher=vertex: needs the package {package}, which is not installed; pip install 'zeroscale[vertex]'"

    def dry_run() -> str:
        vertex_options._find_missing_package.cache_clear()
        assert main(["sweep", *N1, "--dry-run"]) == 0
        return " ".join(capsys.readouterr().out.split())

    try:
        assert "pip install" not in dry_run()
        monkeypatch.setitem(sys.modules, module, None)
        assert told in dry_run()
    finally:
        vertex_options._find_missing_package.cache_clear()
