"""Proofs, from the ops of a pass, that samples stay apart and where they lie."""
