"""Supervisor of a node: it starts the node's ranks, monitors them, and ends all of them as soon as one rank is lost.

The supervisor does not import torch, so it starts immediately and uses few resources. If a rank dies or raises an
exception, the run ends within seconds, long before the timeout of a collective. If a rank sends no heartbeat for longer
than the limit `hang_s` (`startup_s` before its first step), the run ends too. The reason is written to the record.
"""
