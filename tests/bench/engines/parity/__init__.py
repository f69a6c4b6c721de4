"""Comparison of every engine with the same training in one process. The cases cover layouts, schedules, model families
and precisions."""
