"""Per-sample gradients, contracted to blocks of a kernel. Nothing here knows a network."""
