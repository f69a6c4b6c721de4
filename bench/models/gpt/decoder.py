"""Decoder-only model in torch. Fields of `Shape` choose among its architectures.

Modules have the names that they have in transformers' Llama, so Llama's weights can be loaded by name. Modules that
Llama lacks have the names that they have in transformers' OPT and Phi-3.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.core.network import IGNORED
from bench.core.spec import ModelSpec
from bench.engines.distributed.slices import TensorRanks
from bench.models.gpt.shape import RotaryScaling, Shape
from bench.models.modules.chunked_loss import ChunkedHead


def build_rotary_tables(shape: Shape, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of rotary embeddings for every position: (length, d_head). If each sample has its
    own positions, the shape is (batch, 1, length, d_head). `places` are the positions, (length,) or (batch, length).

    Angles are computed in fp32 at every precision of the model, because bf16 cannot represent all integer positions
    above 256.
    """
    assert shape.rotary_base is not None
    even = torch.arange(0, shape.d_head, 2, dtype=torch.float32, device=places.device)
    frequencies = 1.0 / shape.rotary_base ** (even / shape.d_head)  # (d_head / 2,)
    if shape.rotary_scaling:
        frequencies = _scale_frequencies(frequencies, shape.rotary_scaling)
    angles = places.unsqueeze(-1).float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)  # the elements of a pair are d_head / 2 apart, as in Llama
    angles = angles.unsqueeze(1) if places.dim() > 1 else angles  # one table for all heads
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys, (batch, heads, length, d_head), rotated by their positions."""
    # elements i and i + d_head / 2 are a pair, as in Llama
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


def _scale_frequencies(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Return the rotary frequencies of Llama 3.1, (d_head / 2,).

    Each dimension rotates a number of times (turns) over the context length of the original pre-training. Dimensions
    with fewer than `low_freq_factor` turns are slowed down by `factor`. Dimensions with more than `high_freq_factor`
    turns are unchanged. For dimensions in between, the frequency is interpolated.
    """
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # weight of the unscaled frequency
    return (1 - share) * frequencies / scaling.factor + share * frequencies


class Output(NamedTuple):
    """Output of a forward pass. With labels it has only `loss`, 0-d, which engines read. Without labels it has only
    `logits`, (batch, length, vocabulary)."""

    loss: Tensor | None
    logits: Tensor | None = None


class WideRmsNorm(nn.Module):
    """Llama's RMS norm. Only the product with the scale is computed in the model's precision; the rest is computed in
    fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, states: Tensor) -> Tensor:
        # the casts are in Llama's order; otherwise bf16 losses would differ
        wide = states.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(states.dtype)


class SelfAttention(nn.Module):
    """Causal self-attention.

    The rows of a fused matrix are ordered by head: query, key and value of the first head, then query, key and value of
    the second head. The heads of a tensor-parallel rank are therefore consecutive rows.
    """

    def __init__(self, shape: Shape, model: ModelSpec) -> None:
        super().__init__()
        self.heads, self.d_head, self.dropout = shape.heads, shape.d_head, model.dropout
        self.groups = shape.heads // (shape.key_heads or shape.heads)
        self.eager, self.fused = model.attention == "eager", shape.fused
        inner, key_inner = shape.heads * shape.d_head, shape.heads // self.groups * shape.d_head
        if shape.fused:
            self.qkv_proj = nn.Linear(shape.width, 3 * inner, bias=shape.biases)
        else:
            self.q_proj = nn.Linear(shape.width, inner, bias=shape.biases)
            self.k_proj = nn.Linear(shape.width, key_inner, bias=shape.biases)
            self.v_proj = nn.Linear(shape.width, key_inner, bias=shape.biases)
        self.o_proj: nn.Module = nn.Linear(inner, shape.width, bias=shape.biases)

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        query, key, value = self.projected(states)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        attend = self.written_out if self.eager else self.by_kernel
        # (batch, heads, length, d_head) becomes (batch, length, heads × d_head)
        attended: Tensor = self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2))
        return attended

    def projected(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each (batch, heads, length, d_head)."""
        if self.fused:
            # (batch, length, 3 × heads × d_head) becomes three of (batch, length, heads, d_head)
            query, key, value = self.qkv_proj(states).unflatten(-1, (self.heads, 3, self.d_head)).unbind(-2)
            return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key, value = (
            projection(states).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return query, key, value

    def written_out(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention computed by explicit matrix products and a softmax. `mask`, broadcast to (batch, heads,
        length, length), is added to the scores."""
        key, value = self.repeated(key), self.repeated(value)
        scores = torch.matmul(query, key.transpose(2, 3)) * self.d_head**-0.5  # (batch, heads, length, length)
        scores = scores if mask is None else scores + mask
        weights = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training)
        return torch.matmul(weights, value)

    def by_kernel(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention computed by torch's scaled_dot_product_attention. `mask` is true where a token may attend.

        On a GPU, torch's kernels for grouped heads (several heads that share keys and values) support neither a mask
        nor fp32. With a mask or in fp32, keys and values are therefore repeated for each head. Without this repetition,
        torch would choose a kernel that stores all attention scores.
        """
        takes_groups = mask is None and (not query.is_cuda or query.dtype != torch.float32)
        if self.groups > 1 and not takes_groups:
            key, value = self.repeated(key), self.repeated(value)
        dropout = self.dropout if self.training else 0.0  # the function does not check the training mode
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=mask is None, enable_gqa=self.groups > 1 and takes_groups
        )

    def repeated(self, of_groups: Tensor) -> Tensor:
        """Return keys or values, (batch, heads, length, d_head), from one tensor per group of heads. The tensor of a
        group is repeated for all heads that share it."""
        return of_groups if self.groups == 1 else of_groups.repeat_interleave(self.groups, dim=1)


class FeedForward(nn.Module):
    """MLP with two matrices and an activation function between them. The gated form multiplies the input by a third
    matrix. This product and the result of the activation function are multiplied element by element."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation, self.gated = shape.activation, shape.gated
        first = nn.Linear(shape.width, shape.inner, bias=shape.biases)
        if shape.gated:
            self.gate_proj = first
            self.up_proj = nn.Linear(shape.width, shape.inner, bias=shape.biases)
        else:
            self.up_proj = first
        self.down_proj: nn.Module = nn.Linear(shape.inner, shape.width, bias=shape.biases)

    def forward(self, states: Tensor) -> Tensor:
        # single expressions, because a local variable would keep a tensor (batch, length, inner) that backward does not
        # need
        made: Tensor
        if self.gated:
            made = self.down_proj(self.activated(self.gate_proj(states)) * self.up_proj(states))
        else:
            made = self.down_proj(self.activated(self.up_proj(states)))
        return made

    def activated(self, states: Tensor) -> Tensor:
        if self.activation == "silu":
            return F.silu(states)
        return F.gelu(states, approximate="tanh" if self.activation == "gelu_new" else "none")


class DecoderLayer(nn.Module):
    """Transformer layer: attention and an MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, shape: Shape, model: ModelSpec) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.input_layernorm, self.self_attn = _norm(shape), SelfAttention(shape, model)
        self.post_attention_layernorm, self.mlp = _norm(shape), FeedForward(shape)

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(states), rotation, mask)
        states = states + F.dropout(attended, self.dropout, self.training)
        return states + F.dropout(self.mlp(self.post_attention_layernorm(states)), self.dropout, self.training)


class Decoder(nn.Module):
    """Decoder from the embedding to the last norm, without the head."""

    def __init__(self, shape: Shape, model: ModelSpec, *, checkpointing: bool) -> None:
        super().__init__()
        self.shape, self.eager, self.dropout = shape, model.attention == "eager", model.dropout
        self.checkpointing = checkpointing
        self.among: TensorRanks | None = None  # the ranks that share each matrix with this rank
        self.embed_tokens: nn.Module = nn.Embedding(shape.vocab, shape.width)
        if shape.rotary_base is None:
            self.embed_positions: nn.Module = nn.Embedding(shape.positions, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape, model) for _ in range(shape.layers))
        self.norm = _norm(shape)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the states after the last norm, (batch, length, width), for the tokens `input_ids`, (batch, length).

        `position_ids`, (batch, length), restart at 0 at each document of a sample. If they are given, a token attends
        only to tokens of its own document.
        """
        states = self.run_layers(self.embed(input_ids, position_ids), position_ids)
        return self.norm(states)  # type: ignore[no-any-return]

    def embed(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return the states before the first layer, (batch, length, width), from tokens and learned positions."""
        states = self.embed_tokens(input_ids)
        if self.shape.rotary_base is None:
            states = states + self.embed_positions(_find_places(input_ids.shape[1], input_ids, position_ids))
        return F.dropout(states, self.dropout, self.training)

    def run_layers(self, states: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return the states after the last of this module's `layers`, (batch, length, width)."""
        # masks and rotations are for all tokens, because attention gets all tokens even with sequence parallelism
        tokens = states.shape[1] if self.among is None else self.among.count_all_tokens(states)
        rotation, mask = None, self.mask(tokens, position_ids, states)
        if self.shape.rotary_base is not None:
            rotation = build_rotary_tables(self.shape, _find_places(tokens, states, position_ids), states.dtype)
        for layer in self.layers:
            if self.checkpointing:
                states = checkpoint(layer, states, rotation, mask, use_reentrant=False)
            else:
                states = layer(states, rotation, mask)
        return states

    def mask(self, tokens: int, position_ids: Tensor | None, states: Tensor) -> Tensor | None:
        """Return the attention mask, (length, length) or (batch, 1, length, length). Return None if the kernel's own
        causal mask is enough."""
        if position_ids is None and not self.eager:
            return None
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=states.device).tril()
        if position_ids is not None:
            document = (position_ids == 0).cumsum(-1)  # (batch, length): index of each token's document
            seen = (seen & (document.unsqueeze(-1) == document.unsqueeze(-2))).unsqueeze(1)
        if not self.eager:
            return seen
        return torch.zeros_like(seen, dtype=states.dtype).masked_fill_(~seen, torch.finfo(states.dtype).min)


class CausalLanguageModel(nn.Module):
    """Decoder with its head and next-token loss."""

    _keys_to_ignore_on_load_unexpected = r"\.attn\.(masked_)?bias$", r"rotary_emb\.inv_freq$"
    """Patterns for the names of tensors that are ignored in a checkpoint, as in transformers. Older checkpoints contain
    these constants: GPT-2's mask buffers and Llama's rotary frequencies."""

    def __init__(self, shape: Shape, model: ModelSpec, *, checkpointing: bool, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.model = Decoder(shape, model, checkpointing=checkpointing)
        self.lm_head: nn.Module = nn.Linear(shape.width, shape.vocab, bias=False)
        # tied before the engine gets the module, so that the engine counts and updates one parameter
        if not shape.separate_head:
            self.lm_head.weight = self.model.embed_tokens.weight  # type: ignore[assignment]
        if model.loss_chunk_tokens:
            assert isinstance(self.lm_head, nn.Linear)
            self.lm_head = ChunkedHead(self.lm_head, model.loss_chunk_tokens)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None) -> Output:
        states = self.model(input_ids, position_ids)
        return Output(None, self.lm_head(states)) if labels is None else Output(self.loss(states, labels))

    def loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the next-token loss, 0-d, from the states after the last norm."""
        following = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # each state predicts the next token
        if isinstance(self.lm_head, ChunkedHead):
            return self.lm_head(states, following)  # type: ignore[no-any-return]
        return self.compute_loss(states, following)

    def compute_loss(self, states: Tensor, following: Tensor) -> Tensor:
        """Return the loss, 0-d, from the states and the label that follows each of them."""
        logits = self.lm_head(states).float().flatten(0, 1)  # (batch × length, vocabulary)
        return F.cross_entropy(logits, following.flatten(), reduction=self.reduction, ignore_index=IGNORED)


def _find_places(tokens: int, like: Tensor, position_ids: Tensor | None) -> Tensor:
    """Return `position_ids` if they are given. Otherwise return the positions from 0 to `tokens` - 1, with shape
    (tokens,), on the device of `like`."""
    return torch.arange(tokens, device=like.device) if position_ids is None else position_ids


def _norm(shape: Shape) -> nn.Module:
    if shape.norm == "layer":
        return nn.LayerNorm(shape.width, eps=shape.norm_eps)
    return WideRmsNorm(shape.width, shape.norm_eps)
