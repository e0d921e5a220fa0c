"""Sizes of what is trained here: a small target with exactly the K2 architecture, and a DFlash drafter for it."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32  # weights that share one INT4 scale, as in the K2 checkpoints


@dataclass(frozen=True)
class Shape:
    """The target. Field names follow the checkpoint's config.json where they are not abbreviated."""

    vocab: int = 8192
    hidden: int = 384
    layers: int = 8
    heads: int = 8
    q_lora: int = 128
    kv_lora: int = 96
    nope: int = 32
    rope: int = 16
    v: int = 32
    dense_inter: int = 576
    moe_inter: int = 128
    experts: int = 16
    topk: int = 4
    scaling: float = 2.0
    eps: float = 1e-5
    latent_eps: float = 1e-6  # q_a and kv_a norms: the published module's class default, not rms_norm_eps
    theta: float = 50000.0
    factor: float = 8.0
    original: int = 512
    max_position: int = 4096
    taps: tuple[int, ...] = (1, 4, 6)
    bos: int = 7936
    eos: int = 7937
    im_end: int = 7938
    pad: int = 8191

    @property
    def latent(self) -> int:
        """Values kept per token and layer: the compressed latent and the shared rotary key."""
        return self.kv_lora + self.rope


@dataclass(frozen=True)
class DraftShape:
    """The drafter; hidden size, vocabulary and rotary base are the target's."""

    layers: int = 3
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    inter: int = 640
    mask_id: int = 8190
    block: int = 16


NANO, NANO_DRAFT = Shape(), DraftShape()

#: Seconds on two CPU cores, for tests: every part present, nothing of use.
SMOKE = Shape(
    vocab=256, hidden=64, layers=3, heads=2, q_lora=32, kv_lora=32, nope=16, rope=16, v=16, dense_inter=96, moe_inter=32,
    experts=4, topk=2, original=64, max_position=512, taps=(0, 1), bos=240, eos=241, im_end=242, pad=255,
)  # fmt: skip
SMOKE_DRAFT = DraftShape(layers=2, heads=4, kv_heads=2, head_dim=32, inter=96, mask_id=254, block=16)
