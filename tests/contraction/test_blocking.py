"""How products are cut."""

import pytest

from featlearn.contraction import blocking


@pytest.mark.parametrize(
    ("columns", "largest", "unit", "width"),
    [
        (1152, 567, 9, 432),  # three slices of 384 would do, in whole channels and multiples of 16
        (1152, 99, 9, 99),  # 144 does not fit: whole channels alone
        (1000, 300, 1, 256),
        (1000, 7, 1, 7),
        (500, 499, 1, 256),
        (50, 45, 49, 25),  # less than a channel fits
    ],
)
def test_slices_are_about_equal(columns: int, largest: int, unit: int, width: int):
    assert blocking._even(columns, largest, unit) == width


def test_slices_are_never_more_or_wider_than_they_must_be():
    for columns in range(2, 300, 7):
        for largest in range(1, columns):
            for unit in (1, 3, 9):
                width = blocking._even(columns, largest, unit)
                assert 1 <= width <= largest
                assert -(-columns // width) == -(-columns // largest)


@pytest.mark.parametrize("rows", [1, 5, 31, 32, 33, 64, 100, 127, 128, 129, 300, 1000, 2000, 5000])
def test_panels_cover_one_triangle_once_in_multiples_of_sixteen(rows: int):
    seen = list(blocking.panels(rows, rows, rows * rows, True, 1))
    assert [chosen.start for chosen, _ in seen] == [0, *(chosen.stop for chosen, _ in seen[:-1])]
    assert seen[-1][0].stop == rows
    assert all(columns == slice(0, chosen.stop) for chosen, columns in seen)
    assert all((chosen.stop - chosen.start) % 16 == 0 for chosen, _ in seen[:-1])
