"""How many launches a call takes. No torch: who counts launches shares it with the launcher."""

SLICE = 512
"""Columns up to which an expert counts as a slice: K of the down part is then at most 8 steps."""
FEW_EXPERTS = 96
"""Wide experts up to which a rank's rows are many to each: the chain of scaled weights."""
FEW, FEW_OF_SLICES = 4, 72
"""Most rows whose y blocks of a down part keep in shared memory, of wide experts (stream.cu) and of slices (duo.cu)."""


CREW_ROWS = 24
"""Rows of an expert, on average, above which few wide experts are served by a crew on an H200 (op.py: "widest", crew.cu)."""


def launches(rows: int, width: int, topk: int, held: int, experts: int, arch: str) -> int:
    """Launches of a call for `rows` rows spread over `experts` experts, of which this rank holds `held` of `width` columns."""
    crew = arch == "sm_90a" and width > SLICE and held <= FEW_EXPERTS and rows > FEW and rows * topk > CREW_ROWS * experts
    return 2 + (rows > few_rows(width)) + crew


def few_rows(width: int) -> int:
    """Rows up to which experts of `width` columns take two launches, not three (no combine)."""
    return FEW_OF_SLICES if width <= SLICE else FEW
