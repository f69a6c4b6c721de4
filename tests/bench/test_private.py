"""Which variables look like a secret, in every place that writes variables down."""

import pytest

from bench.launchers.slurm.options import Options
from bench.measure.environment import select_variables
from bench.private import is_secret

SECRETS = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "DB_PASS", "DB_PWD", "PGPASSWORD", "API_KEYS", "WANDB_API_KEY",
    "OPENAI_APIKEY", "HF_TOKEN", "HF_TOKENS", "GITHUB_PAT", "CREDENTIALS", "GOOGLE_APPLICATION_CREDENTIALS",
    "PASSPHRASE", "DS_AUTH", "UCX_CRED", "SLURM_JWT", "TORCHINDUCTOR_REDIS_URL", "ssh_private_key", "NETRC",
)  # fmt: skip
HARMLESS = (
    "OMP_NUM_THREADS", "NCCL_DEBUG", "NCCL_IB_PKEY", "TOKENIZERS_PARALLELISM", "PYTHONPATH", "PATH", "PWD",
    "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "GLOO_SOCKET_IFNAME", "UCX_TLS", "KMP_AFFINITY", "MASTER_ADDR",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_stands_in_no_script_and_no_record(name: str) -> None:
    assert is_secret(name)
    assert not select_variables({name: "x"})
    with pytest.raises(ValueError, match="looks like a secret"):
        Options.model_validate({"environment": {name: "x"}})


@pytest.mark.parametrize("name", HARMLESS)
def test_what_runs_need_may_be_written_down(name: str) -> None:
    assert not is_secret(name)
    Options.model_validate({"environment": {name: "x"}})


def test_an_address_with_a_password_is_in_no_record() -> None:
    assert select_variables({"NCCL_DEBUG_FILE": "/tmp/%h", "NCCL_NET": "tcp://user:secret@host/x"}) == {
        "NCCL_DEBUG_FILE": "/tmp/%h"
    }
