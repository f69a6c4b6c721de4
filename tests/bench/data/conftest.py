from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.core.spec import RunSpec

SHAPE = {
    "d_model": 4, "d_kv": 2, "d_ff": 6, "encoder_layers": 1, "decoder_layers": 1, "heads": 2,
    "gated": True, "activation": "gelu_new", "separate_head": True,
}  # fmt: skip


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a temporary cache for Hugging Face `datasets`."""
    datasets = pytest.importorskip("datasets")
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    return Path(datasets.config.HF_DATASETS_CACHE)


@pytest.fixture
def make_spec() -> Callable[..., RunSpec]:
    """Function that builds the RunSpec of a tiny run. `source` is the name of its data source, `options` are the
    options of this source, and `fields` replace other fields of RunSpec."""

    def make(source: str = "synthetic", options: dict[str, Any] | None = None, **fields: Any) -> RunSpec:
        loading = {key: fields.pop(key) for key in ("workers", "prefetch") if key in fields}
        plain = {
            "model": {"name": "tiny", "shape": {**SHAPE, "vocab": fields.pop("vocab", 384)}},
            "engine": {"name": "ddp", "backend": "ddp"},
            "data": {"name": source, "source": source, "options": options or {}, **loading},
            "batch": {"micro": 2},
            "sequence": {"encoder": 64, "decoder": 32},
        }
        return RunSpec.model_validate(plain | fields)

    return make
