"""Watching a training run: what its kernels, features and weights do, recorded while it trains and changing nothing.

`fl.watch` is the function `watch`. This package has its name, and once it is imported Python puts the package in the
place of the function: so it can be called as well.
"""

import sys
from types import ModuleType
from typing import Any

from featlearn.watch.entry import watch
from featlearn.watch.moment import Moment
from featlearn.watch.session import Watch

__all__ = ["Moment", "Watch", "watch"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Watch:
        return watch(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
