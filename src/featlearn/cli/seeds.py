"""The option --seeds."""

import re

from featlearn.cli.answer import UsageError


def seeds_in(words: str) -> list[int]:
    """Parse '3' as seeds 0, 1, 2, and '101-103' and '3,5,8' as listed seeds."""
    if re.fullmatch(r"\d+", words):
        seeds = list(range(int(words)))
    else:
        parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in words.split(",")]
        if None in parts:
            raise UsageError(f"--seeds is {words!r}, expected a count such as 3, or seeds such as 101-103 or 3,5,8")
        bounds = [(int(part[1]), int(part[2] or part[1])) for part in parts if part is not None]
        seeds = [seed for low, high in bounds for seed in range(low, high + 1)]
    if not seeds or len(set(seeds)) != len(seeds):
        raise UsageError(f"--seeds is {words!r}, expected at least 1 seed, without repetitions")
    return seeds
