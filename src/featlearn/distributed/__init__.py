"""Measurements that several processes make together, and models whose weights are spread over them."""
