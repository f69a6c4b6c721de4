"""The T5 family: T5 and T5 v1.1 (arXiv 1910.10683) and mT5 (arXiv 2010.11934), as transformers builds them."""

from bench.models.t5.shape import MODEL_TYPES, Shape, check, from_hugging_face, stacks, token_kinds, vocabulary

__all__ = ["MODEL_TYPES", "Shape", "check", "from_hugging_face", "stacks", "token_kinds", "vocabulary"]
