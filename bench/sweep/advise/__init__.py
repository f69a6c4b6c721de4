"""Advice on engine, micro-batch and node count: the question, the search for candidates, and excluded candidates with
their remedies."""
