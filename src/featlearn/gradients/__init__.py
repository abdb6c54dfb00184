"""Per-sample gradients of any parameter, for any output directions, of one batch of samples."""
