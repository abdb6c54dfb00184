"""Linear algebra and sampling, independent of networks."""
