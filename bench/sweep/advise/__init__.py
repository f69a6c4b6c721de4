"""Which stage, micro-batch and node count to take: the question, the search, what was left out and what would help."""
