"""Sweeps. The folder of a study holds its whole state:

`sweeps/<when>.json`           one call of `sweep`, with all of its points (`definition`)
`jobs/<name>/`                 one job: its points, its script, its number at the scheduler (`jobs`)
`excluded/<host>.json`         nodes that failed their health check
`<config_id>/<repeat>.<n>/`    the attempts (`bench.core.store`)

There is no database and no lock: every file is written once by one process, and states are computed from the files.
"""
