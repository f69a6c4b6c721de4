"""How sure the numbers are. Every interval says its kind, level and n; `few` says where its level is not kept.

interval    what all of them return
repeats     the median of independent repeats
series      median, mean and rate of one run's autocorrelated steps
effective   how many independent steps a run's steps are worth
ratio       one configuration's step time over another's
compare     verdicts on many such pairs
family      many configurations or pairs judged together, so that all verdicts hold at once
detectable  what repeats could have shown, and how many more show a smaller difference
drift       what the machine did meanwhile, from its control points
"""
