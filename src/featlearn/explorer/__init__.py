"""What `featlearn explore` writes: one HTML page with the exact theories and small networks that train beside them."""
