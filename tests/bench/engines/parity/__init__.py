"""Comparison of every engine with one process: a covering set of layouts, schedules, families and precisions."""
