"""Conversion of config files and overrides to a RunSpec.

compose        composes Hydra's config files, the points of a study and overrides; the only user of Hydra
decode         decodes a composed config tree into frozen models, and checks it
exclude_rules  evaluates the rules with which a study excludes points; lists the fields that rules may name
reference      lists every config key with its meaning; builds JSON schemas for editors
"""
