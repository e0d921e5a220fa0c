"""How many launches a call takes. No torch: who counts launches shares it with the launcher."""

SLICE = 512
"""Columns up to which an expert counts as a slice: K of the down part is then at most 8 steps."""
FEW_EXPERTS = 96
"""Wide experts up to which a rank's rows are many to each: the chain of scaled weights."""
FEW, FEW_OF_SLICES = 4, 72
"""Most rows whose y blocks of a down part keep in shared memory, of wide experts (stream.cu) and of slices (duo.cu)."""
JOINED_ROWS, CREW_ROWS, BROAD_ROWS = 19, 19, 52
"""Rows of an expert, on average, up to which few wide experts take one launch for both parts on an H200 (op.py: "joined",
joined.cu), above which a crew serves them, and up to which its tiles are of 64 tokens and not of 128 ("broad" and "widest",
crew.cu)."""


def launches(rows: int, width: int, topk: int, held: int, experts: int, arch: str) -> int:
    """Launches of a call for `rows` rows spread over `experts` experts, of which this rank holds `held` of `width` columns."""
    few_wide = arch == "sm_90a" and width > SLICE and held <= FEW_EXPERTS and rows > FEW
    crew, joined = rows * topk > CREW_ROWS * experts and width % 512 == 0, rows * topk <= JOINED_ROWS * experts and width % 256 == 0
    return 2 + (rows > few_rows(width)) + (few_wide and crew) - (few_wide and joined)


def few_rows(width: int) -> int:
    """Rows up to which experts of `width` columns take two launches, not three (no combine)."""
    return FEW_OF_SLICES if width <= SLICE else FEW
