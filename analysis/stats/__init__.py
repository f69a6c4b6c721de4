"""Uncertainty of measured times. Every interval states its kind, level and n.

intervals      confidence intervals from the autocorrelated steps of runs, or from independent repeats.
compare        comparison of two configurations: ratio of their times, verdict, and number of repeats that a verdict
               needs.
family         multiple comparisons: verdicts on many configurations or pairs, with a limit on the probability that any
               verdict is wrong.
change_points  changes over time: level changes of a series, and drift of a configuration repeated in an allocation.
"""
