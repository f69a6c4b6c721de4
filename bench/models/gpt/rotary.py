"""Positions by rotation (RoPE, arXiv 2104.09864): each pair of a query's or key's elements is turned by an angle that
grows with the position, as transformers' Llama does it: the pairs are elements i and i + d_head / 2."""

import math

import torch
from torch import Tensor

from bench.models.gpt.shape import RotaryScaling, Shape


def tables(shape: Shape, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position, (tokens, d_head), or (samples, 1, tokens, d_head) for positions by
    sample. Angles are computed in fp32, whatever the precision in which a model is built."""
    assert shape.rotary_base is not None
    even = torch.arange(0, shape.d_head, 2, dtype=torch.float32, device=places.device)
    frequencies = 1.0 / shape.rotary_base ** (even / shape.d_head)
    if shape.rotary_scaling:
        frequencies = _scaled(frequencies, shape.rotary_scaling)
    angles = places.unsqueeze(-1).float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    angles = angles.unsqueeze(1) if places.dim() > 1 else angles
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys, (samples, heads, tokens, d_head), turned by their positions."""
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines


def _scaled(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Slow down what turns fewer than `low_freq_factor` times within the texts that were trained on first, leave what
    turns more than `high_freq_factor` times, and go from one to the other in between (Llama 3.1)."""
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / scaling.factor + share * frequencies
