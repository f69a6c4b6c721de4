"""Advice on stage, micro-batch and node count: question, search, rejected candidates and remedies."""
