"""Figures of 004, Three Mechanisms of Feature Learning in the Exact Solution of a Latent Variable Model."""
