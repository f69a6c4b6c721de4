"""Published shapes of the T5 family, as a spec has them."""

from typing import Any

from analysis.claims.published import read

SIZES = ("d_model", "d_kv", "d_ff", "encoder_layers", "decoder_layers", "heads", "vocab")


def read_shape(name: str) -> dict[str, Any]:
    """Return the shape of a model of `results/published/t5_shapes.csv`."""
    row = _find_row(name)
    gated = row["gated_ffn"] == "true"
    return {
        **{size: int(row[size]) for size in SIZES},
        "gated": gated,
        "activation": "gelu_new" if gated else "relu",  # v1.1 and mT5; the first T5
        "separate_head": row["separate_head"] == "true",
    }


def read_parameter_count(name: str) -> int:
    """Return the published count of a model's parameters."""
    return int(_find_row(name)["parameters"])


def _find_row(name: str) -> dict[str, str]:
    (row,) = (row for row in read("t5_shapes").rows if row["model"] == name)
    return row
