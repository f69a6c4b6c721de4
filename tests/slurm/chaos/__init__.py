"""Random faults, chosen by seeds, in real sweeps: `make chaos`, or `python -m chaos` in tests/slurm."""
