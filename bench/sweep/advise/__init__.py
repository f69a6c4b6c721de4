"""Advice on stage, micro-batch and node count: the question, the search, excluded candidates and their remedies."""
