"""Processes inside an allocation: one leader and, on every other node, one agent.

The leader on the first node runs the points of a job in order, and each agent runs every point together with it.
Neither process imports torch.
"""
