"""Searches over a space of points: the next trial, the end of the search, and its result."""
