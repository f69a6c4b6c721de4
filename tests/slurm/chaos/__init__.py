"""Random faults, by seeds, over real sweeps: `python -m chaos` in tests/slurm, or `make chaos`."""
