"""The held-out suite: no threshold was set on these runs, and none of their settings is one of the calibration's."""

from benchmarks.verdict import held_out_lazy, held_out_rich

FIRST_SEED = 1001
CONSTRUCTIONS = (*held_out_lazy.CONSTRUCTIONS, *held_out_rich.CONSTRUCTIONS)
