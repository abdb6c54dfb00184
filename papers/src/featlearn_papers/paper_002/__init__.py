"""Figures of Atanasov et al. 2022, Neural Networks as Kernel Learners: The Silent Alignment Effect."""
