"""Advice on engine, micro-batch and node count for a training: parsing of the question, the search for candidates, and
the excluded candidates with remedies."""
