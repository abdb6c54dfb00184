"""Each module computes a tangent kernel with one library: `kernel(network, x, mode)`, the same axes everywhere.

`mode` is `traced` (the mean over outputs, (P, P)), `each` (C, P, P) or `full` (P, P, C, C).
"""
