"""For which sizes the down part sums over a row's experts itself. No torch: who counts launches shares it with the launcher."""

SLICE = 512
"""Columns up to which an expert counts as a slice: K of the down part is then at most 8 steps."""
FEW_EXPERTS = 96
"""Wide experts up to which a rank's rows are many to each: the chain of scaled weights."""
FEW, FEW_OF_SLICES = 4, 72
"""Most rows whose y blocks of a down part keep in shared memory, of wide experts (stream.cu) and of slices (duo.cu)."""


def few_rows(width: int) -> int:
    """Rows up to which experts of `width` columns take two launches, not three (no combine)."""
    return FEW_OF_SLICES if width <= SLICE else FEW
