"""Program that injects random faults into real sweeps. A seed determines the faults. Start it with `make chaos`, or
with `python -m chaos` in tests/slurm."""
