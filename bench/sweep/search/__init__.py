"""Searches: which point of a space is tried next, when that ends, and what was found."""
