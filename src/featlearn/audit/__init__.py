"""Checks that a batch is read correctly: sample axes, rules, independence of samples."""
