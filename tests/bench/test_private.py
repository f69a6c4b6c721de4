"""Tests that zeroscale never writes a secret to a file. It recognises secrets by the name of an environment variable or
by their format."""

import argparse
import zipfile
from pathlib import Path

import pytest

from analysis.cli import pack
from analysis.report.contents import read_tail
from bench.config import compose
from bench.core.errors import UserError
from bench.core.private import is_secret, mask_tokens
from bench.core.record import Outcome
from bench.core.store import to_json
from bench.launchers.slurm.options import Options
from bench.measure.environment import select_variables
from bench.runtime.process import RankLog
from bench.sweep.jobs import find_last_line

SECRETS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "DB_PASS", "DB_PWD", "PGPASSWORD", "API_KEYS", "WANDB_API_KEY",
    "OPENAI_APIKEY", "HF_TOKEN", "HF_TOKENS", "GITHUB_PAT", "CREDENTIALS", "GOOGLE_APPLICATION_CREDENTIALS",
    "PASSPHRASE", "DS_AUTH", "NCCL_OOB_CERT", "UCX_LICENSE",
    "NCCL_PRIVATE_KEY", "UCX_CRED", "SLURM_JWT", "TORCHINDUCTOR_REDIS_URL", "ssh_private_key", "NETRC",
    "MYHFTOKEN", "COHEREAPIKEY", "AWSACCESSKEY", "SECRETKEY", "DISK_ENCRYPTIONKEY", "NCCL_SITEAUTHKEY",
)  # fmt: skip
HARMLESS = (
    "OMP_NUM_THREADS", "NCCL_DEBUG", "NCCL_IB_PKEY", "TOKENIZERS_PARALLELISM", "PYTHONPATH", "PATH", "PWD",
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "GLOO_SOCKET_IFNAME", "UCX_TLS", "KMP_AFFINITY", "MASTER_ADDR",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_in_no_script_and_no_record(name: str) -> None:
    assert is_secret(name)
    assert not select_variables({name: "x"})
    with pytest.raises(ValueError, match="looks like a secret"):
        Options.model_validate({"environment": {name: "x"}})


@pytest.mark.parametrize("name", HARMLESS)
def test_variables_that_runs_need_are_recorded(name: str) -> None:
    assert not is_secret(name)
    Options.model_validate({"environment": {name: "x"}})


TOKENS = (
    "hf_" + "aB3" * 11, "sk-" + "aB3d" * 12, "sk-proj-" + "a_B-3" * 9, "AKIA" + "Q7" * 8, "ghp_" + "aB3" * 12,
    "github_pat_" + "11AB_" * 9, "glpat-" + "x-Y_9" * 4,
)  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_token_is_masked_by_its_format_in_logs_records_and_variables(token: str, tmp_path: Path) -> None:
    text = f'loading with token="{token}", as asked'
    masked = mask_tokens(text.encode()).decode()
    assert token[8:] not in masked and masked.endswith('***", as asked')
    log = RankLog(tmp_path / "run.log")
    log.write(0, text.encode())
    log.close(10)
    assert (tmp_path / "run.log").read_text() == f"[0] {masked}\n"
    assert token[8:] not in to_json(Outcome(kind="error", reason=text)).decode()
    (tmp_path / "slurm-1.log").write_text(text)
    assert find_last_line(tmp_path / "slurm-1.log") == masked
    assert not select_variables({"NCCL_NET": token})
    with pytest.raises(ValueError, match="looks like a secret"):
        Options.model_validate({"environment": {"PLAIN": token}})
    with pytest.raises(UserError, match=r"\*\*\*.*contains an access token"):
        compose.compose_request([("model", "tiny"), ("model.name", token)])


@pytest.mark.parametrize("before", ["\n", "\t", "\x1b[32m", "\x1b[1;38;5;200m", "https://x/?token%3D", "«", "hf_x/"])
@pytest.mark.parametrize("token", TOKENS)
def test_token_is_masked_after_a_line_break_a_colour_code_or_an_escape(token: str, before: str) -> None:
    """In JSON, a line break is written as a backslash and the letter n. If a token follows, this n must not count as
    the first letter of the token. Otherwise, the token would not be recognised."""
    text = f"Traceback:{before}{token}"
    assert token[8:] not in mask_tokens(text.encode()).decode()
    assert token[8:] not in to_json(Outcome(kind="error", reason=text)).decode()


@pytest.mark.parametrize("token", TOKENS)
def test_archive_of_a_whole_folder_masks_tokens_in_its_logs(token: str, tmp_path: Path) -> None:
    """The scheduler writes the log of a job, so zeroscale cannot mask tokens at that time. It must mask them when it
    packs the folder into an archive."""
    job = tmp_path / "study/jobs/one"
    job.mkdir(parents=True)
    (job / "slurm-1.log").write_text(f"\0+ export X={token}\n")
    (job / "steps.parquet").write_bytes(b"\0binary")
    assert pack.run(argparse.Namespace(paths=[tmp_path / "study"], whole=True, out=tmp_path / "kept.zip")) == 0
    with zipfile.ZipFile(tmp_path / "kept.zip") as archive:
        log, binary = archive.read("jobs/one/slurm-1.log").decode(), archive.read("jobs/one/steps.parquet")
    assert log.startswith("\0+ export X=") and log.endswith("***\n") and token[8:] not in log
    assert binary == b"\0binary"


@pytest.mark.parametrize("token", TOKENS)
def test_a_report_masks_tokens_in_the_end_of_a_log(token: str, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(f"[0] token={token}\n")
    assert token[8:] not in read_tail(tmp_path / "run.log")


def test_text_that_resembles_a_token_is_kept() -> None:
    text = (
        b"task-some-long-name-with-2-parts hf_dataset sk-learn AKIAnything /x/hf_cache/models--google--mt5-base-12345 "
        b"weighs_targets_of_each_micro_batch"
    )
    assert mask_tokens(text) == text


def test_unknown_library_variable_is_recorded_only_if_numeric() -> None:
    """An unknown environment variable with the prefix of a library may still contain a secret.

    So its value is recorded only if it is a number or a switch such as `yes`.
    """
    given = {"NCCL_IB_TIMEOUT": "22", "NCCL_SITE_PLUGIN": "s3cr3t", "UCX_MAX_RNDV_RAILS": "4", "NCCL_NTHREADS": "yes",
             "NCCL_ALGO": "Ring,Tree", "NCCL_SOCKET_IFNAME": "=ib0"}  # fmt: skip
    hidden = given | {"NCCL_SITE_PLUGIN": "(set, not recorded)"}
    assert select_variables(given) == hidden


def test_address_with_a_password_is_not_recorded() -> None:
    assert select_variables({"NCCL_DEBUG_FILE": "/tmp/%h", "NCCL_NET": "tcp://user:secret@host/x"}) == {
        "NCCL_DEBUG_FILE": "/tmp/%h"
    }
