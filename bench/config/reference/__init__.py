"""Reference of every config key with its meaning, for the reference pages, `zeroscale explain`, completion and editors.

config    keys of a run, a study, a machine and a site, with type, default and meaning
schema    the same keys as JSON schemas, with which an editor completes and checks a file
"""
