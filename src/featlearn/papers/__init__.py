"""The experiments of the five papers, and the networks they use."""
