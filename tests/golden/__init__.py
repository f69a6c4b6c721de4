"""Digests of the command's current output, which refactoring must not change.

cases       every case by name, and its output
digests.json  the digest of each text
__main__    writes both: the digests, and the texts themselves for comparing two revisions
"""
