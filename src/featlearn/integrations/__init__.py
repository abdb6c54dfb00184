"""Watching runs that other libraries train: `lightning.callback` and `transformers.callback`.

Thin adapters around `fl.watch`; what they record and how is the same.
"""

from featlearn.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]
