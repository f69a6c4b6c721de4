"""What a machine really does: measured by real processes, a file for each thing, and put together into a `Machine`."""
