"""Sweeps. The folder of a study contains the whole state of its sweeps:

`sweeps/<time>.json`           one call of `sweep`, with all of its points (`definition`)
`jobs/<name>/`                 one job: its points, its script, its job id at the scheduler (`jobs`)
`excluded/<host>.json`         nodes that are unfit for measurements (`jobs`)
`<config_id>/<repeat>.<n>/`    attempt n at one repeat of a configuration (`bench.core.store`)

There is no database and no lock. Files are written atomically, and states are computed from the files.
"""
