"""Measurements of a run: clock, window, memory, collectives, environment."""
