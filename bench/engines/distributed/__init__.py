"""What engines share that divide a model among ranks: schedules of a pipeline as values, and where a model is cut."""
