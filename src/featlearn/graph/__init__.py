"""The autograd graph of a forward pass, and where in it parameters meet samples."""
