"""Two revisions or two environments measured in turn on one machine, so that what it does meanwhile meets both.

sides    what a user may name, and what it means
rounds   who runs when, and one run of a side
"""
