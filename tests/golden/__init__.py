"""Golden tests: digests of the current output of the command, which refactoring must not change.

cases         returns every case by name: a function that returns an output as text
digests       reads and writes the digests in digests.json
__main__      writes the digests, and the outputs themselves for comparing two revisions
"""
