"""The study on one GPU: its parts in order of worth, ended and continued at will, and packed as one file.

`python -m bench.gpu_study` runs it, `python -m bench.gpu_study.wheels` fills a folder for a machine without a network.
"""
