"""Measurements of a run: step times, losses, memory, collectives, background load and the environment."""
