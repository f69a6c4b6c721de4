"""Code for engines that divide a model among ranks: pipeline schedules, division into stages, tensor-parallel slices
and flat tensors."""
