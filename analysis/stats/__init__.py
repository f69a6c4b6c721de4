"""How sure the numbers are. Every interval states its kind, level and n.

interval    what all of them return
repeats     the median of independent repeats
series      median, mean and rate of one run's autocorrelated steps
windows     intervals of the steps of many runs at once
ratio       one configuration's step time over another's
compare     verdicts on many such pairs
family      many configurations or pairs judged together, so that all verdicts hold at once
detectable  what repeats could have shown, and how many more show a smaller difference
levels      variance between allocations, runs and steps, and which further runs narrow an interval most
drift       what the machine did meanwhile, from its control points
"""
