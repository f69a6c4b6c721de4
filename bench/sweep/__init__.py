"""A sweep as it stands on the disk, in the folder of its study: what was asked, what was submitted, what has an answer.

`sweeps/<when>.json`           what was asked once, every point of it (`definition`)
`jobs/<name>/`                 one job: its points, its script, the scheduler's number for it (`jobs`)
`excluded/<host>.json`         nodes that failed their health check
`<config_id>/<repeat>.<n>/`    the attempts (`bench.core.store`)

There is no database and no lock: every file is written once by one process, and what follows from them is computed.
"""
