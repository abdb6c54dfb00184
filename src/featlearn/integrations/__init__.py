"""Callbacks for other training libraries: `lightning.callback` and `transformers.callback`.

They are thin adapters around `fl.watch` and record the same quantities.
"""

from featlearn.integrations import lightning, transformers

__all__ = ["lightning", "transformers"]
