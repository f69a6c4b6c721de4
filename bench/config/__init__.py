"""From config files and overrides to a RunSpec.

compose        Hydra's configs, a study's points, overrides: the only user of Hydra
decode         a composed tree as frozen values, checked
exclude_rules  rules by which a study leaves points out, and the fields that they name
"""
