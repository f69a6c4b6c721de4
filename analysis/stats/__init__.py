"""Uncertainty of measured times. Every interval states its kind, level and n.

intervals      intervals of the autocorrelated steps of runs, and of independent repeats.
compare        ratio of two configurations' times, verdicts on many such pairs, and their statistical power.
family         many configurations or pairs judged together, so that all verdicts hold at once.
change_points  changes over time: of the level of a series, and drift over the control points of one allocation.
"""
