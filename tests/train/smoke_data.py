"""A tiny data folder for the training commands: noisy chains over 200 tokens, documents, and pairs in chat form."""

from __future__ import annotations

from pathlib import Path

import numpy as np

EOS, IM_END, USER, ASSISTANT, THINK, THINK_END = 241, 242, 243, 244, 245, 246


def write(folder: Path, documents: int = 300, pairs: int = 1200) -> Path:
    """Write corpus, pairs, held and held_pairs with their indexes; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    following = rng.integers(0, 200, (200, 3))

    def text(length: int) -> list[int]:
        out = [int(rng.integers(200))]
        for _ in range(length - 1):
            out.append(int(following[out[-1], rng.choice(3, p=[0.8, 0.15, 0.05])]))
        return out

    for name, count in (("corpus", documents), ("held", documents // 10)):
        stream: list[int] = []
        for _ in range(count):
            stream += [*text(int(rng.integers(50, 300))), EOS]
        np.array(stream, dtype="<u2").tofile(folder / f"{name}.bin")
    for name, count in (("pairs", pairs), ("held_pairs", pairs // 10)):
        stream, index = [], []
        for _ in range(count):
            start = len(stream)
            stream += [USER, *text(int(rng.integers(3, 12))), IM_END, ASSISTANT, THINK, THINK_END]
            index.append((start, len(stream)))
            stream += [*text(int(rng.integers(5, 30))), IM_END]
        np.array(stream, dtype="<u2").tofile(folder / f"{name}.bin")
        np.save(folder / f"{name}.idx.npy", np.array(index, dtype=np.uint32))
    return folder
