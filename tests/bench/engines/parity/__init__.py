"""Whether every engine trains as one process does: a covering set of layouts, schedules, families and precisions."""
