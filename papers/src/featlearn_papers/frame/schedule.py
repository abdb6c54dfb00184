"""The steps of a training at which it is measured."""


def growing_steps(last: int, growth: float) -> list[int]:
    """0, 1, and on to the last step: each `growth` times the one before, and at least one more."""
    found = [0, 1]
    while found[-1] < last:
        found.append(min(last, max(found[-1] + 1, round(found[-1] * growth))))
    return found
