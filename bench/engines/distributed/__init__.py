"""Code of engines that divide a model among ranks: schedules of a pipeline, partitions, slices, flat tensors."""
