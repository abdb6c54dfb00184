"""Numbers of a network: what is asked of its per-sample gradients."""
