"""Everything that ranks do together, on real gloo ranks; all checks of one number of ranks share their processes."""

from pathlib import Path

import pytest

from .ranks import outcomes


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_measure_together_what_one_process_measures(size: int, tmp_path: Path):
    said = outcomes(size, tmp_path, 240)
    assert said
    failed = [(name, rank, text) for name, texts in said.items() for rank, text in enumerate(texts) if text]
    assert not failed, "\n".join(f"--- {name}, rank {rank}\n{text}" for name, rank, text in failed)
