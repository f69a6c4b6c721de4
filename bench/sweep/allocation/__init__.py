"""Processes inside an allocation: the leader on the first node goes through the points of a job; the agent on every
other node runs each point with it. Neither imports torch."""
