"""Cost, chunk sizes and memory of a measurement: the only place that chooses sizes and counts passes."""
