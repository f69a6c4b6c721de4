"""What can be set, with what each key means: for the reference, `zeroscale explain`, completion and editors.

comments  the comments beside the fields of a class and beside the keys of a YAML file: what they mean
keys      the keys of a class of values, with type, default and meaning
config    every key that a run, a sweep, a study, a machine or a site can be given
schema    the same as JSON schemas, by which an editor completes and checks a file
"""
