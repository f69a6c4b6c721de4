"""One node's supervisor: starts the node's ranks, watches them, and ends all of them as soon as one is lost.

It imports no torch, so it starts at once and uses few resources next to its ranks. A rank's death, exception or silence
ends the run within seconds, long before the collectives' timeout, and becomes a record.
"""
