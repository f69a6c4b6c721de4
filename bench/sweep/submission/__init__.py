"""From points that have no answer yet to jobs of a scheduler: what `sweep` starts, `resume` and the autopilot go on
with. Everything is computed anew from the study's folder and the scheduler, so it can be interrupted anywhere."""
