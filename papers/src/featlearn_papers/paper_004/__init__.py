"""Figures of Xu & Ziyin 2024, Three Mechanisms of Feature Learning in the Exact Solution of a Latent Variable Model."""
