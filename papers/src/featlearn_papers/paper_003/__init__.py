"""Figures of Beaglehole et al. 2024, Feature Learning as Alignment."""
