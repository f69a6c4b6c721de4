"""One node's supervisor: starts the node's ranks, watches them, and ends all of them as soon as one is lost.

It imports no torch, so it is up at once and light beside what it watches. A rank's death, exception or silence ends the
run within seconds instead of the collectives' timeout, and becomes a record.
"""
