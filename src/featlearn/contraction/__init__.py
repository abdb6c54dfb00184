"""Contract per-sample gradients to blocks of a kernel, independent of networks."""
