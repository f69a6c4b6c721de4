"""From configs and overrides to a RunSpec.

compose        Hydra's configs, a study's points, overrides: the only user of Hydra
decode         a composed tree as frozen values, checked
rule_fields    a point's fields as the rules of a study see them
exclude_rules  the language in which a study leaves points out
"""
