"""The previous-token table: how much likelier a token becomes after a given one, as sparse pointwise mutual information.

A block-diffusion drafter predicts every depth without knowing which token was drafted before it. The table adds
PMI(parent, x) = log p(x | parent) - log p(x), counted from text, while the tree grows. It only ranks candidates:
whatever it holds, the committed tokens are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from draftwood.errors import ConfigError

_TENSORS = ("row_ptr", "cols", "vals", "base")


@dataclass(frozen=True)
class Bigram:
    """Compressed sparse rows: entries row_ptr[p]..row_ptr[p+1] of `cols` (ascending ids) and `vals` (PMI, nats) belong
    to previous token p; every token not listed there has PMI base[p]."""

    row_ptr: NDArray[np.int64]
    cols: NDArray[np.int64]
    vals: NDArray[np.float32]
    base: NDArray[np.float32]

    @property
    def vocab_size(self) -> int:
        """Number of previous tokens the table knows."""
        return len(self.base)

    @staticmethod
    def load(path: str | Path, vocab_size: int) -> Bigram:
        """Read a safetensors file with row_ptr int32 [V+1], cols uint16|int32, vals float16, base float16 [V].

        Raises ConfigError when the file is missing, is not such a table, or belongs to another vocabulary.
        """
        try:
            tensors = load_file(str(path))
        except (OSError, SafetensorError, TypeError) as error:  # TypeError: a type that numpy lacks
            raise ConfigError(f"previous-token table {path} cannot be read ({error}); pass --bigram none or another file") from None
        missing = [name for name in _TENSORS if name not in tensors]
        if missing:
            raise ConfigError(f"previous-token table {path} has no tensor {missing[0]!r}; pass --bigram none or another file")
        if any(tensors[name].ndim != 1 for name in _TENSORS):
            raise ConfigError(f"previous-token table {path} has a tensor that is no vector; pass --bigram none or another file")
        row_ptr, cols = tensors["row_ptr"].astype(np.int64), tensors["cols"].astype(np.int64)
        vals, base = tensors["vals"].astype(np.float32), tensors["base"].astype(np.float32)
        if len(base) != vocab_size or len(row_ptr) != vocab_size + 1:
            raise ConfigError(
                f"previous-token table {path} is for {len(base)} tokens, the model has {vocab_size}; count it with this tokenizer"
            )
        table = Bigram(row_ptr, cols, vals, base)
        problem = table._problem()
        if problem:
            raise ConfigError(f"previous-token table {path}: {problem}; count it again")
        return table

    def _problem(self) -> str | None:
        """Say what makes the rows unusable, or None."""
        lengths = np.diff(self.row_ptr)
        if self.row_ptr[0] != 0 or (lengths < 0).any() or self.row_ptr[-1] != len(self.cols):
            return "row_ptr does not divide its entries"
        if len(self.vals) != len(self.cols):
            return f"{len(self.cols)} columns but {len(self.vals)} values"
        if len(self.cols) and (self.cols.min() < 0 or self.cols.max() >= self.vocab_size):
            return f"a column is outside the vocabulary 0..{self.vocab_size - 1}"
        inner = np.ones(max(len(self.cols) - 1, 0), bool)
        inner[self.row_ptr[1:-1][(self.row_ptr[1:-1] > 0) & (self.row_ptr[1:-1] < len(self.cols))] - 1] = False
        if (np.diff(self.cols)[inner] <= 0).any():
            return "columns of a row are not ascending"
        if not (np.isfinite(self.vals).all() and np.isfinite(self.base).all()):
            return "a value is not finite"
        return None

    def scores(self, prev: int, candidates: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return PMI(prev, x) in nats for each candidate x, [C] float32. An unknown `prev` changes nothing (zeros)."""
        if not 0 <= prev < len(self.base):
            return np.zeros(len(candidates), np.float32)
        low, high = self.row_ptr[prev], self.row_ptr[prev + 1]
        if low == high:
            return np.full(len(candidates), self.base[prev], np.float32)
        cols = self.cols[low:high]
        at = cols.searchsorted(candidates)
        return np.where(cols.take(at, mode="clip") == candidates, self.vals[low:high].take(at, mode="clip"), self.base[prev])
