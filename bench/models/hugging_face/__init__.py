"""Family of all architectures that transformers trains as language models, each given by its config.json. Their runs
can be measured, but not predicted."""

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
