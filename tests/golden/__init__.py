"""What the command answers today, kept so that moving code about changes none of it.

cases       every case by name, and the text that it gives
digests.json  the digest of each text
__main__    writes both: the digests, and the texts themselves for comparing two revisions
"""
