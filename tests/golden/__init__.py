"""Golden tests: the output of the command `zeroscale`, which a refactoring must not change, is compared with stored
digests.

  cases         has all cases by name; a case is a function that returns an output as text
  digests       reads and writes the digests in digests.json
  __main__      writes the digests, and the outputs themselves for comparing two revisions
"""
