"""One tangent kernel: executed by its plan, divided among ranks, sketched, verified."""
