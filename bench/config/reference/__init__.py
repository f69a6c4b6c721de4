"""What can be set, with what each key means: for the reference, `zeroscale explain`, completion and editors.

config    every key that a run, a sweep, a study, a machine or a site can be given, with type, default and meaning
schema    the same as JSON schemas, by which an editor completes and checks a file
"""
