"""Searches over a space of points: proposals of trials, the end of a search, and its result."""
