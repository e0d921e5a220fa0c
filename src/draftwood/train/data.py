"""Token files of a data folder, on the training device, and the windows a training step takes from them.

A data folder holds `NAME.bin` or `NAME.bin.xz` (uint16 little endian) for corpus, pairs, held and held_pairs, and
`pairs.idx.npy` / `held_pairs.idx.npy` (or .xz), uint32 [n, 2]: start of each pair and start of its answer. Corpus
documents end with [EOS], pairs with <|im_end|>. A large corpus may be cut into shards, corpus-0.bin and on, each with
whole documents; any of them alone, or all, will do.
"""

from __future__ import annotations

import io
import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.errors import ConfigError
from draftwood.train.files import SHARDS
from draftwood.train.shapes import Shape


def read_bytes(folder: Path, name: str, limit: int | None = None) -> bytes:
    """Bytes of folder/name or of folder/name.xz, at most `limit`. ConfigError when missing or damaged."""
    plain, packed = folder / name, folder / f"{name}.xz"
    for path in (plain, packed):
        if path.is_file():
            return read_file(path, limit)
    raise ConfigError(f"{plain} (or .xz) does not exist; give --data a folder made by `draftwood train pack`")


def read_file(path: Path, limit: int | None = None) -> bytes:
    """Bytes of a file, unpacked when it is .xz, at most `limit`. ConfigError when damaged or unreadable."""
    try:
        with lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb") as stream:
            return stream.read(-1 if limit is None else limit)
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"{path} is not a complete xz file ({error}); copy or make it again") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check its name and rights") from None


def token_ids(raw: bytes, name: object, vocab: int) -> np.ndarray:
    """uint16 ids of a token file's bytes; every id must be below `vocab`."""
    if len(raw) % 2 or not raw:
        raise ConfigError(f"{name} holds {len(raw)} bytes, not a positive even number; make it again")
    ids = np.frombuffer(raw, dtype="<u2")
    top = int(ids.max())
    if top >= vocab:
        raise ConfigError(f"{name} holds token {top}, the vocabulary ends at {vocab - 1}; use its own tokenizer")
    return ids


def read_tokens(folder: Path, name: str, vocab: int, limit: int | None = None) -> np.ndarray:
    """uint16 token ids of folder/name.bin[.xz], at most `limit` of them."""
    return token_ids(read_bytes(folder, f"{name}.bin", None if limit is None else limit * 2), f"{folder}/{name}.bin", vocab)


def corpus_files(folder: Path) -> list[Path]:
    """corpus.bin[.xz] of a data folder, or those of its shards corpus-0, corpus-1, ... that are there."""
    names = ["corpus", *(f"corpus-{i}" for i in range(SHARDS))]
    paths = [next((p for p in (folder / f"{n}.bin", folder / f"{n}.bin.xz") if p.is_file()), None) for n in names]
    found = [path for path in paths if path is not None]
    if not found:
        raise ConfigError(f"{folder} holds no corpus.bin or corpus-0.bin (or .xz); give --data a folder of `draftwood train pack`")
    return found[:1] if paths[0] else found


def read_index(folder: Path, name: str, tokens: int) -> np.ndarray:
    """int64 [n, 2] (start, answer start) of folder/name.idx.npy[.xz], cut to the first `tokens` tokens."""
    try:
        index = np.load(io.BytesIO(read_bytes(folder, f"{name}.idx.npy")))
    except ValueError as error:
        raise ConfigError(f"{folder}/{name}.idx.npy is not a numpy file ({error}); make it again") from None
    if index.ndim != 2 or index.shape[1] != 2:
        raise ConfigError(f"{folder}/{name}.idx.npy has shape {list(index.shape)}, expected [pairs, 2]; make it again")
    index = index.astype(np.int64)
    index = index[index[:, 1] < tokens]
    if len(index) == 0:
        raise ConfigError(f"{folder}/{name}.idx.npy names no pair inside the first {tokens} tokens; make it again")
    return index


@dataclass
class Tokens:
    """One pair of token streams: text documents and chat pairs."""

    corpus: Tensor  # [n] int32
    pairs: Tensor  # [m] int32
    documents: Tensor  # [d] long: start of each document in corpus
    index: Tensor  # [p, 2] long: start and answer start of each pair


def load_tokens(
    folder: Path, shape: Shape, device: torch.device, held: bool = False, limit: int | None = None, corpus: list[Path] | None = None
) -> Tokens:
    """Read the training (or held-out) streams, all files side by side; `limit` tokens of each stream at most.

    The corpus is the files `corpus`, or what `corpus_files` finds in the folder: an equal share of `limit` from each.
    """
    names = ("held", "held_pairs") if held else ("corpus", "pairs")
    files = [] if held else corpus or corpus_files(folder)
    share = None if limit is None else -(-limit // max(1, len(files)))
    with ThreadPoolExecutor() as pool:
        parts = [pool.submit(read_file, path, None if share is None else share * 2) for path in files]
        text = [pool.submit(read_tokens, folder, name, shape.vocab, limit) for name in (names if held else names[1:])]
        streams = [token_ids(part.result(), path, shape.vocab) for path, part in zip(files, parts, strict=True)]
        *first, pairs = (part.result() for part in text)
    stream = np.concatenate([*streams, *first])
    index = read_index(folder, names[1], len(pairs))
    ends = np.flatnonzero(stream == shape.eos) + 1
    documents = np.concatenate([[0], ends[ends < len(stream)]])

    def put(a: np.ndarray, kind: type) -> Tensor:
        return torch.from_numpy(a.astype(kind)).to(device)

    return Tokens(put(stream, np.int32), put(pairs, np.int32), put(documents, np.int64), put(index, np.int64))


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """stream [n], starts [B] -> [B, length] long."""
    return stream[starts[:, None] + torch.arange(length, device=stream.device)].long()


class Mixture:
    """Draws batches: pair windows that begin at a pair, corpus windows that begin at a document or anywhere."""

    def __init__(self, tokens: Tokens, pairs_share: float, begin_share: float, generator: torch.Generator) -> None:
        self.tokens, self.pairs_share, self.begin_share, self.generator = tokens, pairs_share, begin_share, generator
        self._usable: dict[int, int] = {}  # window length -> pairs that start early enough (found once, it syncs)

    def check(self, length: int) -> None:
        """ConfigError when a stream is shorter than one window."""
        for name, n in (("corpus", len(self.tokens.corpus)), ("pairs", len(self.tokens.pairs))):
            if n <= length + 1:
                raise ConfigError(f"{name} holds {n} tokens, fewer than one window of {length + 2}; give more text")

    def _draw(self, count: int, high: int) -> Tensor:
        return torch.randint(0, high, (count,), generator=self.generator, device=self.tokens.corpus.device)

    def pair_windows(self, rows: int, length: int) -> Tensor:
        """[rows, length], each from the beginning of a pair."""
        starts = self.tokens.index[:, 0]
        if length not in self._usable:
            self._usable[length] = int((starts <= len(self.tokens.pairs) - length).sum())
        return windows(self.tokens.pairs, starts[self._draw(rows, self._usable[length])], length)

    def corpus_windows(self, rows: int, length: int) -> Tensor:
        """[rows, length]; a share of `begin_share` starts at a document's first token (documents equally likely)."""
        last = len(self.tokens.corpus) - length
        begin = round(rows * self.begin_share)
        starts = self.tokens.documents[self._draw(begin, len(self.tokens.documents))]
        return windows(self.tokens.corpus, torch.cat([starts.clamp(max=last), self._draw(rows - begin, last + 1)]), length)

    def batch(self, rows: int, length: int) -> Tensor:
        """[rows, length]: the first round(pairs_share * rows) rows are pairs."""
        pairs = round(rows * self.pairs_share)
        return torch.cat([self.pair_windows(pairs, length), self.corpus_windows(rows - pairs, length)])


def prompts(index: Tensor, longest: int) -> Tensor:
    """Pairs whose prompt (up to and including <think></think>) has at most `longest` tokens: [n, 2]."""
    kept = index[(index[:, 1] - index[:, 0]) <= longest]
    if len(kept) == 0:
        raise ConfigError(f"no pair has a prompt of at most {longest} tokens; allow longer prompts or give other pairs")
    return kept


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of the data folder, {} when there is none."""
    path = folder / "meta.json"
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); make the data folder again") from None
