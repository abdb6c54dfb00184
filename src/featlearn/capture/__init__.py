"""The only code that walks the autograd graph: from a network and its probe to per-sample gradients."""
