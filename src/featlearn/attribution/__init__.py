"""What training samples did to a network, and what a run would have been without them: descent along its kernels."""
