"""Supervisor of a node: it starts the node's ranks, monitors them, and ends all of them as soon as one rank is lost.

The supervisor does not import torch, so it starts immediately and uses few resources. If a rank dies, raises an
exception or stops sending heartbeats, the run ends within seconds. This is long before the timeout of a collective. The
reason is written to the record.
"""
