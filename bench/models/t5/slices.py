"""A T5's part on one of several tensor-parallel ranks: heads, feed-forward widths and vocabulary are divided."""

from typing import Any

from torch import nn

from bench.distributed.slices import SlicedEmbedding, SummedLinear, TensorRanks, cut_weights

DIMENSIONS = {
    "q": 0, "k": 0, "v": 0, "o": 1, "relative_attention_bias": 1, "wi": 0, "wi_0": 0, "wi_1": 0, "wo": 1,
    "shared": 0, "lm_head": 0,
}  # fmt: skip
"""Of each sliced weight, by the module that owns it. Norms are whole."""
OTHER_STATES = "key_value_states", "encoder_hidden_states"
"""What T5's attention, and umT5's, call the states that give keys and values in place of their own."""


def slice_part(part: nn.Module, among: TensorRanks) -> None:
    """Keep this rank's slices of a part without memory, and exchange where its sub-layers begin and end."""
    cut_weights(part, DIMENSIONS, among)
    modules: list[tuple[str, Any]] = list(part.named_modules())
    for name, module in modules:
        kind = name.rpartition(".")[2]
        if kind in ("SelfAttention", "EncDecAttention") and hasattr(module, "q"):
            _slice_attention(module, among)
        elif kind == "DenseReluDense":
            module.wo = SummedLinear(module.wo, among)
            module.register_forward_pre_hook(_make_entrance(among), with_kwargs=True)
    if hasattr(part, "shared"):
        part.shared = SlicedEmbedding(part.shared, among)  # type: ignore[arg-type]


def _slice_attention(attention: Any, among: TensorRanks) -> None:
    attention.n_heads //= among.ranks
    attention.inner_dim //= among.ranks
    attention.o = SummedLinear(attention.o, among)
    attention.register_forward_pre_hook(_make_entrance(among), with_kwargs=True)


def _make_entrance(among: TensorRanks) -> Any:
    """Return what a sub-layer does with its arguments before its forward."""

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        states, *others = arguments
        entered = {
            name: among.enter(named[name]) if name in OTHER_STATES and named[name] is not None else named[name]
            for name in named
        }
        return (among.enter(states), *others), entered

    return enter
