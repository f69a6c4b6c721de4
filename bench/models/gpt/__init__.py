"""Family of decoder-only models: GPT-2 and GPT-3 (arXiv 2005.14165), Llama 2 and 3 (arXiv 2307.09288, 2407.21783).
Fields of its Shape choose among their architectures."""

from bench.models.gpt.shape import MODEL_TYPES, Shape, check, from_hugging_face, stacks, token_kinds, vocabulary

__all__ = ["MODEL_TYPES", "Shape", "check", "from_hugging_face", "stacks", "token_kinds", "vocabulary"]
