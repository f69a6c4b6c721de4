"""How sure the numbers are. Every interval states its kind, level and n.

intervals      an interval, and those of one run's autocorrelated steps and of independent repeats
windows        the same of many runs at once
compare        one configuration's time over another's, verdicts on many such pairs, what more repeats could show
family         many configurations or pairs judged together, so that all verdicts hold at once
drift          what the machine did meanwhile, from its control points
change_points  where the level of a series changed
"""
