"""The bundle: unpacked elsewhere it gives the same pictures, its commands name the same points, and no name is left."""

import csv
import hashlib
import io
import os
import re
import shlex
import shutil
import tarfile
import time
from pathlib import Path

import pytest
from records import failed, results, run, save, scattered, spec, steps

from analysis import reading, report
from analysis.bundle import archive, build_bundle
from analysis.bundle.anonymize import build_anonymizer
from analysis.bundle.macros import build_keys, render_macros
from analysis.report.evidence import read_tail
from analysis.table import list_rows
from bench import store
from bench.cli import main
from bench.config import compose
from bench.errors import UserError
from bench.record import RunRecord
from bench.spec import config_id

RECORDED = Path(__file__).parents[1] / "data" / "runs"


def packed(paths: list[Path], here: dict[str, str] | None = None) -> bytes:
    name, files = build_bundle(reading.read_records(paths), paths, here)
    return archive.pack_archive(name, files)


def unpacked(content: bytes, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(content)) as found:
        found.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


# -- elsewhere


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke study's bundle, unpacked."""
    return unpacked(packed([RECORDED / "smoke"]), tmp_path_factory.mktemp("elsewhere"))


def test_the_report_from_a_bundle_is_that_of_the_original(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(RECORDED / "smoke", tmp_path / "runs")
    drawn = []
    for folder in (tmp_path, elsewhere):
        monkeypatch.chdir(folder)
        assert main(["report", "runs", "--out", str(tmp_path / f"report{len(drawn)}")]) == 0
        out = tmp_path / f"report{len(drawn)}"
        drawn.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert drawn[0].keys() == drawn[1].keys()
    assert b"<svg" in drawn[0][Path(report.PAGE)]
    assert [path for path in drawn[0] if drawn[0][path] != drawn[1][path]] == []


def test_its_commands_name_the_same_points(elsewhere: Path) -> None:
    """The records are of an older protocol, by which nothing is measured any more: all else is the same."""
    [protocol] = {store.read_record(path).spec.measure for path in store.find_records([RECORDED / "smoke"])}
    points = rows(elsewhere / "points.csv")
    assert len(points) == 20
    for point in points:
        zeroscale, verb, flag, conf, *overrides = shlex.split(point["command"])
        assert (zeroscale, verb, flag) == ("zeroscale", "run", "--config-dir")
        asked = compose.compose_request(compose.parse_single(overrides), elsewhere / conf)
        assert config_id(asked.spec.model_copy(update={"measure": protocol})) == point["config_id"]
        assert asked.spec.measure.window_s == protocol.window_s


@pytest.mark.parametrize(
    "odd",
    [
        ["engine=zero3", "engine.overlap_comm=false"],  # not what the file of that name says, but the option's default
        ["model.name='1e5'", "model.attention=eager", "model.dropout=0.1"],  # a number for Hydra
        ["data=text", "data.name=my.text", "data.workers=2", "data.files=['/data/it\\'s, {a} $b/*.txt']"],
        ["batch.micro=3", "batch.global=24", "optimizer.lr=1e-7", "optimizer.betas=[0.5,0.75]", "precision=fp32"],
        ["activation_checkpointing=true", "measure.inspect=false", "measure.window_s=0.5", "seed=2147483647"],
    ],
    ids=str,
)
def test_a_command_names_a_point_whatever_its_settings(odd: list[str], tmp_path: Path) -> None:
    of = compose.compose_request(compose.parse_single(odd)).spec
    inside = unpacked(packed([save(tmp_path / "runs", run(of))]), tmp_path / "elsewhere")
    (point,) = rows(inside / "points.csv")
    words = shlex.split(point["command"])
    assert (
        compose.compose_request(compose.parse_single(words[4:]), inside / words[3]).spec.model_dump() == of.model_dump()
    )


def test_the_manifest_holds_every_files_digest(elsewhere: Path) -> None:
    told = {row["path"]: (int(row["bytes"]), row["sha256"]) for row in rows(elsewhere / archive.MANIFEST)}
    there = {
        path.relative_to(elsewhere).as_posix(): path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()
    }
    there.pop(archive.MANIFEST)
    assert told == {path: (len(content), hashlib.sha256(content).hexdigest()) for path, content in there.items()}


def test_equal_records_make_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(RECORDED / "smoke", tmp_path / name / "smoke", copy_function=shutil.copy)
    assert packed([tmp_path / "a" / "smoke"]) == packed([tmp_path / "b" / "smoke"])


def test_folders_that_hold_the_same_point_stay_apart(tmp_path: Path) -> None:
    paths = [save(tmp_path / rate, run(machine={"name": rate})) / "smoke" for rate in ("slow", "fast")]
    inside = unpacked(packed(paths), tmp_path / "elsewhere")
    assert len(list((inside / "runs" / "slow").rglob(store.RECORD))) == 1
    assert len(reading.read_records([inside / "runs"]).records) == 2


def test_the_verb_writes_where_the_study_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "results" / "runs", run(study="odd: study"))
    monkeypatch.chdir(tmp_path)
    assert main(["bundle", "--anonymous"]) == 0
    assert capsys.readouterr().out == "results/bundles/odd__study-anonymous.tar.gz\n"
    assert main(["bundle", str(tmp_path / "results" / "runs"), "--out", "/proc/nowhere/file"]) == 2
    assert "cannot be written" in capsys.readouterr().err


# -- of somebody else's records


def test_no_member_of_a_bundle_leads_out_of_its_folder(tmp_path: Path) -> None:
    record = run()
    assert record.environment
    odd = {"environment_id": "../../../../x", "versions": {"torch": "2", "a\n-r x": "1", "b": "1\n-r x"}}
    environment = record.environment.model_copy(update=odd)
    folder = save(tmp_path / "runs", record.model_copy(update={"environment": environment}))
    content = packed([folder])
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert not [name for name in archive.getnames() if ".." in name or name.startswith("/")]
    inside = unpacked(content, tmp_path / "elsewhere")
    assert [path.read_text() for path in inside.glob("environments/*.txt")] == ["torch==2\n"]
    for path in ("../x", "a/../../x", "/x"):
        with pytest.raises(UserError, match="leads out of the bundle"):
            archive_of({path: b""})


def archive_of(files: dict[str, bytes]) -> bytes:
    return archive.pack_archive("name", files)


def test_the_manifest_holds_names_with_quotes(tmp_path: Path) -> None:
    inside = unpacked(archive_of({'a "b", c\nd': b"", "e": b"x"}), tmp_path)
    told = list(csv.reader(io.StringIO((inside / archive.MANIFEST).read_text(), newline="")))
    assert [row[0] for row in told[1:]] == ['a "b", c\nd', "e"]


@pytest.mark.parametrize("names", [None, {}], ids=["named", "anonymous"])
def test_a_token_in_a_log_of_an_older_version_is_masked(names: dict[str, str] | None, tmp_path: Path) -> None:
    token = "hf_" + "aB3" * 11
    folder = save(tmp_path / "runs", run())
    next(folder.rglob(store.RECORD)).with_name(store.LOG).write_text(f"[0] logged in with {token}\n")
    _, files = build_bundle(reading.read_records([folder]), [folder], names)
    (log,) = [content.decode() for path, content in files.items() if path.endswith(store.LOG)]
    assert log == "[0] logged in with hf_***\n"


def test_only_regular_files_are_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A log that is a link leads to what its study does not hold; a pipe would never end; a torn series is no table."""
    folders = [save(tmp_path / "runs" / name, run()) / "smoke" for name in ("link", "pipe", "torn")]
    link, pipe, torn = (next(folder.rglob(store.RECORD)).parent for folder in folders)
    (tmp_path / "key").write_text("PRIVATE KEY")
    (link / store.LOG).symlink_to(tmp_path / "key")
    os.mkfifo(pipe / store.LOG)
    (torn / store.STEPS).write_bytes(b"PAR1 and then nothing")
    for here in (None, {}):
        content = packed([tmp_path / "runs"], here)
        inside = unpacked(content, tmp_path / ("anonymous" if here is not None else "whole"))
        assert not list(inside.rglob(store.LOG))
        assert "PRIVATE" not in "".join(path.read_text() for path in inside.rglob("*") if path.is_file())
    assert sum("left out of the bundle" in message for message in caplog.messages) == 4
    assert read_tail(link / store.LOG) == read_tail(pipe / store.LOG) == ""


# -- anonymous

NAMES = (
    "frontnode17", "frontnode18", "frontnode23", "hpc.example.edu", "jdoe", "bigiron", "secretq", "proj4711",
    "nightly-run", "/scratch", "/opt/envs", "192.168.7.9", "fe80::a1b2:c3d4", "GPU-0a1b2c3d", "deadbeef", "corpora",
    "jane.doe", "site_env", "josé",
)  # fmt: skip


def named() -> RunRecord:
    """A run whose record holds names wherever a record can."""
    words = ["model.name=jdoe_tiny", "data=text", "data.files=['/scratch/jdoe/corpora/my own/*.txt']", "nodes=2"]
    of = compose.compose_request(compose.parse_single([*words, "devices_per_node=1"])).spec
    slurm = {
        "SLURM_CLUSTER_NAME": "bigiron", "SLURM_JOB_PARTITION": "secretq", "SLURM_JOB_NAME": "nightly-run",
        "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "frontnode[17-18]",
    }  # fmt: skip
    environment = {
        "hosts": ("frontnode17.hpc.example.edu", "frontnode18"),
        "slurm": slurm,
        "cpus": {"ranks": [{"rank": 0, "host": "frontnode17", "device": "GPU-0a1b2c3d-0000-1111-2222-333344445555"}]},
        "variables": {"LD_PRELOAD": "/opt/envs/jdoe/lib.so", "NCCL_SOCKET_IFNAME": "ib0"},
        "git": {"commit": "deadbeef", "dirty": True},
    }
    good = run(of, environment=environment, data={"files": ["/scratch/jdoe/corpora/a.txt"]})
    launcher = {
        "name": "slurm",
        "partition": "secretq",
        "account": "proj4711",
        "job": "nightly-run",
        "setup": ["site_env"],
    }
    around = good.circumstance.model_copy(
        update={
            "launcher": launcher,
            "overrides": (
                "launcher=slurm_bigiron",
                "launcher.account=proj4711",
                "data.files=[/scratch/jdoe/c]",
                "nodes=2",
            ),
            "question": "by jane.doe@hpc.example.edu",
        }
    )
    evidence = {
        "frontnode18": "Connection closed by peer [192.168.7.9]:29, fe80::a1b2:c3d4:e5f6:7",
        "versions": "12.6.4.1",
        "scheduler": {"words": "12|UserId=jdoe(1001)|Account=proj4711|FRONTNODE[17,23]"},
        "traceback": 'File "/home/jdoe/zs/bench/worker.py", line 1\nFile "/opt/envs/x/site-packages/torch/a.py"',
    }
    outcome = good.outcome.model_copy(update={"kind": "error", "reason": "frontnode23 died", "evidence": evidence})
    return good.model_copy(update={"circumstance": around, "outcome": outcome})


@pytest.fixture(scope="module")
def anonymous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(
        tmp_path_factory.mktemp("jdoe") / "runs",
        named(),
        run(compose.compose_request([]).spec, study="jdoe", environment={"hosts": ("vm",)}),
    )
    (log,) = folder.glob(f"smoke/*/0.0/{store.RECORD}")
    log.with_name(store.LOG).write_text(
        "[0] jdoe@frontnode17: cd /scratch/jdoe && cc -I/opt/envs/x; see frontnode23 vm josé\n"
    )
    return unpacked(packed([folder], {"vm": "host", "root": "user", "José": "user"}), tmp_path_factory.mktemp("out"))


def test_no_name_is_left_in_any_file_or_path(anonymous: Path) -> None:
    files = [path for path in anonymous.rglob("*") if path.is_file()]
    text = "\n".join(f"{path.relative_to(anonymous)}\n{path.read_text()}" for path in files)
    assert [name for name in NAMES if name.lower() in text.lower()] == []
    assert not re.search(r"\bvm\b", text)


def test_a_name_has_the_same_pseudonym_throughout(anonymous: Path) -> None:
    (file,) = [path for path in anonymous.rglob(store.RECORD) if "error" in path.read_text()]
    record, log = store.read_record(file), file.with_name(store.LOG).read_text()
    assert record.environment
    (first, domain), second = record.environment.hosts[0].split("."), record.environment.hosts[1]
    assert domain in record.circumstance.question
    assert record.environment.slurm["SLURM_JOB_NODELIST"] == f"{first},{second}"
    assert second in record.outcome.evidence
    assert f"@{first}:" in log
    third = record.outcome.reason.removesuffix(" died")
    assert third in log and third not in (first, second)
    assert 'site-packages/torch/a.py"' in record.outcome.evidence["traceback"], "whose library it is stays known"
    assert "/bench/worker.py" in record.outcome.evidence["traceback"]


def test_records_without_names_are_still_records_of_their_points(anonymous: Path) -> None:
    found = reading.read_records([anonymous / "runs"])
    assert (len(found.records), found.skipped) == (2, ())
    commands = {row["config_id"]: shlex.split(row["command"])[4:] for row in rows(anonymous / "points.csv")}
    for file, record in found.records.items():
        assert file.parts[-3] == record.config_id == config_id(record.spec)
        asked = compose.compose_request(compose.parse_single(commands[record.config_id]), anonymous / "conf")
        assert config_id(asked.spec) == record.config_id


def test_numbers_and_common_words_stay(anonymous: Path) -> None:
    (file,) = [path for path in anonymous.rglob(store.RECORD) if "error" in path.read_text()]
    record, before = store.read_record(file), named()
    assert record.environment and record.observations and before.observations
    assert record.observations.steps == before.observations.steps
    assert record.environment.variables["NCCL_SOCKET_IFNAME"] == "ib0"
    assert record.circumstance.overrides[-1] == "nodes=2"
    assert record.outcome.evidence["versions"] == "12.6.4.1", "no address, though it looks like one"


def test_the_recorded_studies_lose_their_hosts() -> None:
    """Every run of the varied studies, and of the many that are alike every tenth, by name: a hash."""
    varied = [RECORDED / study for study in ("failures", "memory", "smoke", "testbed")]
    many = [sorted((RECORDED / study).rglob(store.RECORD)) for study in ("peaks", "step_time")]
    alike = [path.parent for paths in many for path in paths[::10]]
    found = reading.read_records([*varied, *alike])
    assert len(found.records) > 80
    _, files = build_bundle(found, [*varied, *alike], {})
    assert not any(re.search(rb'"host": "vm"|"vm"', content) for content in files.values())


LINES = {
    "connecting to (gpu017.zebra.acme-lab.org, 29500)": "gpu017 zebra acme",
    "GPU017.ZEBRA.ACME-LAB.ORG is another node of acme-lab.org": "gpu017 zebra acme",
    "gpu017.bigiron: ok": "gpu017 bigiron",
    "SLURM_JOB_USER=jdoe SLURM_JOB_ACCOUNT=acct SLURM_JOB_QOS=prio SLURM_CLUSTER_NAME=zinc7": "jdoe acct prio zinc7",
    "sbatch --qos=prio --account=acct --reservation=maint7 --constraint=a100x": "prio acct maint7 a100x",
    "uid=1001(jdoe) gid=1001(jgroup) groups=1001(jgroup),27(acmeteam)": "jdoe jgroup acmeteam",
    "SLURM_SUBMIT_HOST=login9 HOSTNAME=gpu044 MASTER_ADDR=gpu045": "login9 gpu044 gpu045",
    "see https://jdoe:hunter@git.acme-lab.org/team/secretproject": "jdoe hunter acme team secretproject",
    "pulled docker://registry.acme-lab.org/nlp-team/train:1": "registry.acme nlp-team train:1",
    "image registry.acme-lab.org/nlp-team/train:1 is there": "nlp-team train:1",
    "cd /scratch/jdoe/my corpora/part one/x.txt now": "scratch jdoe corpora",
    "open '/proj x/secret corpora/x'": "proj secret corpora",
    "from </scratch/acme/x> and ->/scratch/acme/y": "scratch acme",
    "at ~/acme/x": "acme",
    "mail j.doe@acme-lab.org": "doe acme",
}


@pytest.mark.parametrize(("line", "gone"), LINES.items(), ids=LINES.values())
def test_no_name_is_left_of_a_line_of_a_log(tmp_path: Path, line: str, gone: str) -> None:
    """The record knows the host, the user and the image; the rest is found by its form."""
    known = {"hosts": ("gpu017",), "slurm": {"SLURM_JOB_NODELIST": "gpu017"}}
    record = run(environment=known)
    assert record.environment
    image = {"container": "docker://registry.acme-lab.org/nlp-team/train:1"}
    classification = record.environment.classification.model_copy(update=image)
    environment = record.environment.model_copy(update={"classification": classification})
    folder = save(tmp_path / "runs", record.model_copy(update={"environment": environment}))
    next(folder.rglob(store.RECORD)).with_name(store.LOG).write_text(f"{line}\n")
    _, files = build_bundle(reading.read_records([folder]), [folder], {"jdoe": "user"})
    text = "\n".join(f"{path}\n{content.decode()}" for path, content in files.items()).lower()
    assert [name for name in gone.split() if name in text] == []
    (classified,) = [content for path, content in files.items() if path.endswith(store.ENVIRONMENT)]
    assert b'"container": "image1"' in classified


def test_common_addresses_and_tags_stay(tmp_path: Path) -> None:
    line = "see https://pytorch.org/docs and <div>x</div> 1/2 gpu017.log mask[0-3] set\n"
    folder = save(tmp_path / "runs", run(environment={"hosts": ("gpu017",)}))
    next(folder.rglob(store.RECORD)).with_name(store.LOG).write_text(line)
    _, files = build_bundle(reading.read_records([folder]), [folder], {})
    (log,) = [content.decode() for path, content in files.items() if path.endswith(store.LOG)]
    assert log == "see https://pytorch.org/path and <div>x</div> 1/2 host1.log mask[0-3] set\n"


LONG = 200_000


@pytest.mark.parametrize(
    "line",
    [
        "mask[0-4294967295] set", "x[0-99999] " * 200, "NodeList=" + "n[0-99999]," * 3, "a" * LONG, "a." * (LONG // 2),
        "a-" * (LONG // 2), "a_" * (LONG // 2), "aB3/" * (LONG // 4), "/bench" * (LONG // 6), "/a b" * (LONG // 4),
        "1." * (LONG // 2), "1:" * (LONG // 2), "'/" * (LONG // 2), "user=" * (LONG // 5), "a@" * (LONG // 2),
        "https://" * (LONG // 8), "[1,2" * (LONG // 4), "n[" * (LONG // 2), "gpu" * (LONG // 3), "gpu0" * (LONG // 4),
        " " * LONG, "=" * LONG, "(1" * (LONG // 2), "gpu1." * (LONG // 5), "/" * LONG, "<" * LONG,
    ],
    ids=lambda line: line[:20],
)  # fmt: skip
def test_a_long_line_is_bare_of_names_at_once(line: str) -> None:
    """None takes the square of its length, and what only looks like a list of nodes is not counted out."""
    begin = time.process_time()
    try:
        hidden = build_anonymizer([run(environment={"hosts": ("gpu017",)})], [line], {})
        hidden.text(line)
    except UserError as error:
        assert "100000 names" in str(error)
    assert time.process_time() - begin < 3, "a fraction of it, on a machine that is not busy"


# -- numbers for a text


def test_every_number_has_a_macro_with_its_interval() -> None:
    of = spec("zero1", ranks=2, micro=4)
    text = render_macros(list_rows(results(run(of, steps=steps(scattered(0.09, 0.1, 0.11)))).summary))
    (key,) = set(re.findall(r"zs@StepSeconds@([0-9a-f]{10})", text))
    assert key == config_id(of)
    assert rf"\@namedef{{zs@StepSeconds@{key}}}{{0.1000}}" in text
    assert rf"\@namedef{{zs@StepSecondsInterval@{key}}}{{0.09000--0.1100 (95\,\% within the run, $n=1$)}}" in text
    assert r"\@namedef{zs@StepSeconds@tiny/zero1/1x2/micro4}{0.1000}" in text
    assert r"\providecommand*{\zsTokensPerSecond}[1]{\zs@number{TokensPerSecond}{#1}}" in text
    assert "zs@Mfu@" not in text, "no peak is known, and a hole is not printed"


def test_a_key_that_two_rows_would_share_names_neither() -> None:
    summary = list_rows(results(run(spec(seed=1)), run(spec(seed=2)), run(spec(seed=2), machine={"name": "b"})).summary)
    assert len(set(build_keys(summary))) == 3
    text = render_macros(summary)
    assert r"@tiny/zero1/1x2/micro2}" not in text and r"@tiny/zero1/1x2/micro2/cpu}" not in text
    assert r"{zs@StepSeconds@tiny/zero1/1x2/micro2/b}" in text


def test_a_failure_has_an_outcome_and_no_number() -> None:
    text = render_macros(list_rows(results(failed("host_oom")).summary))
    assert r"}{host\_oom}" in text
    assert r"\@namedef{zs@StepSeconds" not in text


def test_the_macros_balance() -> None:
    text = render_macros(list_rows(results(*(run(spec(micro=m)) for m in (1, 2))).summary))
    bare = re.sub(r"\\[{}%$]|%.*", "", text)
    assert bare.count("{") == bare.count("}") > 20
    assert text.count("$") % 2 == 0
