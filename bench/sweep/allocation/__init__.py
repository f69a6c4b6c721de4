"""What runs inside an allocation: one conductor on its first node, which goes through the points of a job, and a member
on every other node, which runs each point with it. Neither imports torch."""
