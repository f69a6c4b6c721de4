"""Processes of a job inside an allocation: one leader on the first node, and one agent on every other node.

The leader goes through the job's points (configurations) in order. Each agent starts the ranks of its own node for
every point. Neither process imports torch.
"""
