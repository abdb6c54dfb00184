"""Models on which every quantity is tested, each awkward in its own way."""
