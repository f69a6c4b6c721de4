"""Uncertainty of measured times. Every interval states its kind, level and n.

intervals      confidence intervals from the autocorrelated steps of runs, or from independent repeats.
compare        ratio of two configurations' times, verdicts on many such pairs, and their statistical power.
family         multiple comparisons: verdicts on many configurations or pairs, with a limit on the probability that any
               verdict is wrong.
change_points  changes over time: level changes of a series, and drift of a configuration repeated in an allocation.
"""
