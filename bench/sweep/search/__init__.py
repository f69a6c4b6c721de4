"""Searches over a space of points (configurations): how trials are proposed, when a search ends, and its result."""
