"""Statistics of a network from its tangent kernel: error bars of predictions, and the noise of gradients."""
