"""`draftwood train bigram`: count which token follows which, and keep the pairs that matter as a sparse table.

For tokens seen together at least `min_count` times the table holds log P(next | previous) / P(next), both smoothed with
`k` pseudo-counts spread like P(next); every other pair has its row's value log(k / (rows + k)). Trees add alpha times
this value to the drafter's log q below depth 1. Any text in the model's own tokenizer will do: no model, no GPU.

File (safetensors): row_ptr int32 [V+1], cols uint16 or int32 [nnz] ascending in each row, vals float16 [nnz],
base float16 [V].
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.errors import ConfigError
from draftwood.train.files import report, token_chunks

ALPHA = 0.4


@dataclass(frozen=True)
class Counts:
    """Pairs seen: `keys` int64 [n] = previous * V + next, ascending; `counts` int64 [n]; token totals as previous and
    as next, int64 [V] each."""

    vocab: int
    keys: Any
    counts: Any
    previous: Any
    following: Any


def count(streams: Iterable[Iterable[Any]], vocab: int) -> Counts:
    """Count neighbours in streams of id chunks, across the chunks of a stream but not across streams.

    Memory is one chunk and the distinct pairs met so far: never [V, V].
    """
    import numpy as np

    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for stream in streams:
        last = np.empty(0, np.int64)
        for chunk in stream:
            ids = np.concatenate([last, chunk.astype(np.int64)])
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                raise ConfigError(f"token id {ids.max()} is not below --vocab {vocab}; give the tokenizer's size")
            last = ids[-1:]
            if len(ids) > 1:
                keys, counts = _merge(keys, counts, *np.unique(ids[:-1] * vocab + ids[1:], return_counts=True))
    previous, following = np.zeros(vocab, np.int64), np.zeros(vocab, np.int64)
    np.add.at(previous, keys // vocab, counts)
    np.add.at(following, keys % vocab, counts)
    return Counts(vocab, keys, counts, previous, following)


def _merge(keys: Any, counts: Any, new_keys: Any, new_counts: Any) -> tuple[Any, Any]:
    """Sum of two sorted count tables."""
    import numpy as np

    both, amounts = np.concatenate([keys, new_keys]), np.concatenate([counts, new_counts])
    order = np.argsort(both, kind="stable")
    both, amounts = both[order], amounts[order]
    first = np.flatnonzero(np.concatenate([[True], both[1:] != both[:-1]]))
    return both[first], np.add.reduceat(amounts, first)


def table(seen: Counts, k: float, min_count: int) -> dict[str, Any]:
    """The arrays of the file, from counts."""
    import numpy as np

    vocab = seen.vocab
    share = (seen.following + 1) / (seen.following.sum() + vocab)  # P(next), float64 [V]
    keep = seen.counts >= min_count
    rows, cols = np.divmod(seen.keys[keep], vocab)
    expected = share[cols]
    values = np.log((seen.counts[keep] + k * expected) / ((seen.previous[rows] + k) * expected))
    row_ptr = np.zeros(vocab + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=vocab), out=row_ptr[1:])
    return {
        "row_ptr": row_ptr,
        "cols": cols.astype(np.uint16 if vocab <= 65_536 else np.int32),
        "vals": values.astype(np.float16),
        "base": np.log(k / (seen.previous + k)).astype(np.float16),
    }


def fitting_count(seen: Counts, max_bytes: int) -> int:
    """The least `min_count` whose table stays within `max_bytes`."""
    import numpy as np

    entry = 4 if seen.vocab <= 65_536 else 6
    fixed = 4 * (seen.vocab + 1) + 2 * seen.vocab + 1024  # row_ptr, base, header
    room = (max_bytes - fixed) // entry
    if room < 1:
        raise ConfigError(f"--max-bytes {max_bytes}: {seen.vocab} rows alone take {fixed} bytes; raise it")
    if len(seen.counts) <= room:
        return 1
    return int(np.partition(seen.counts, -room - 1)[-room - 1]) + 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=Path, nargs="+", required=True, metavar="FILE", help="token files, .bin[.xz]")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--dtype", choices=("uint16", "uint32"), default="uint16", help="of the token files")
    parser.add_argument("--k", type=float, default=100.0, help="pseudo-counts per previous token")
    parser.add_argument("--max-bytes", type=float, default=1.05e6, help="size of the table; sets the least count")
    parser.add_argument("--min-count", type=int, default=0, help="least count, instead of --max-bytes")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="weight that trees use by default")


def _progress(path: Path, dtype: str, bar: Any) -> Iterator[Any]:
    for chunk in token_chunks(path, dtype):
        bar.update(len(chunk))
        yield chunk


def run(args: argparse.Namespace) -> int:
    from safetensors.numpy import save_file
    from tqdm import tqdm

    if args.k <= 0 or args.vocab < 1 or args.min_count < 0:
        raise ConfigError(f"--k {args.k} --vocab {args.vocab} --min-count {args.min_count}: give positive numbers")
    with tqdm(desc="count", unit="tok", unit_scale=True) as bar:
        seen = count([_progress(path, args.dtype, bar) for path in args.tokens], args.vocab)
        tokens = bar.n
    if not len(seen.keys):
        raise ConfigError("--tokens hold no two neighbouring tokens; give more text")
    min_count = args.min_count or fitting_count(seen, int(args.max_bytes))
    arrays = table(seen, args.k, min_count)
    facts = {"vocab_size": args.vocab, "alpha": args.alpha, "k": args.k, "min_count": min_count, "source_tokens": tokens}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, args.out, metadata={name: str(value) for name, value in facts.items()})
    facts |= {"distinct_pairs": len(seen.keys), "entries": len(arrays["cols"]), "bytes": args.out.stat().st_size}
    report([(name, value) for name, value in facts.items()], facts)
    return 0
