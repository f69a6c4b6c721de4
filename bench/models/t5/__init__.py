"""Family of T5 models as transformers builds them: T5 and T5 v1.1 (arXiv 1910.10683), mT5 (2010.11934), ByT5
(2105.13626), FLAN-T5 (2210.11416) and umT5 (2304.09151)."""

from bench.models.t5.shape import MODEL_TYPES, Shape, check, from_hugging_face, stacks, token_kinds, vocabulary

__all__ = ["MODEL_TYPES", "Shape", "check", "from_hugging_face", "stacks", "token_kinds", "vocabulary"]
