"""Random faults in real sweeps. A seed determines the faults. Start them with `make chaos`, or with `python -m chaos`
in tests/slurm."""
