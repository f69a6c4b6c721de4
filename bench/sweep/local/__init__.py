"""Runs on this machine, started and followed by the process that asks for them."""
