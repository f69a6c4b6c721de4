"""Any architecture that transformers trains as a language model, by its config.json: measured, not predicted."""

from bench.models.hugging_face.shape import (
    MODEL_TYPES,
    Shape,
    check,
    from_hugging_face,
    stacks,
    token_kinds,
    vocabulary,
)

__all__ = ["MODEL_TYPES", "Shape", "check", "from_hugging_face", "stacks", "token_kinds", "vocabulary"]
