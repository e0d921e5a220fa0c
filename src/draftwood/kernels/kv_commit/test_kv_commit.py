"""Compaction of accepted paths: compile limits and refusals without a GPU; on a GPU, every byte."""

from __future__ import annotations

import pytest
import torch

from draftwood.kernels import check, jit
from draftwood.kernels.kv_commit import op, ref

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_all_variants_compile_within_limits(arch: str) -> None:
    for variant in op.variants():
        assert check.check("kv_commit", variant, arch).spill_bytes == 0


def test_unfit_tensors_are_refused_in_one_line() -> None:
    path, counts = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    slots = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="16 bytes"):
        op.commit_latents(torch.zeros(2, 10, 12, dtype=torch.bfloat16), slots, path, counts)
    with pytest.raises(ValueError, match="counts must be int64"):
        op.commit_latents(torch.zeros(2, 10, 16, dtype=torch.bfloat16), slots, path, counts.int())
    with pytest.raises(ValueError, match="slots must be int64"):
        op.commit_latents(torch.zeros(1, 4, 16), slots.int(), path, counts)


class TestOnDevice:
    pytestmark = gpu

    @staticmethod
    def paths(rows: int, nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random ascending paths from the root, -1 padded, of 1..16 nodes; some rows keep everything in place."""
        g = torch.Generator().manual_seed(seed)
        width = min(16, nodes)
        path, counts = torch.full((rows, width), -1), torch.ones(rows, dtype=torch.int64)
        for r in range(rows):
            n = int(torch.randint(1, width + 1, (1,), generator=g))
            picked = torch.randperm(nodes - 1, generator=g)[: n - 1].sort().values + 1
            path[r, :n] = torch.arange(n) if r % 5 == 4 else torch.cat((torch.zeros(1, dtype=torch.int64), picked))
            counts[r] = n
        return path.cuda(), counts.cuda()

    @pytest.mark.parametrize(("layers", "width"), [(61, 576), (8, 112)])
    @pytest.mark.parametrize("rows", [1, 2, 7, 33, 128])
    @pytest.mark.parametrize("nodes", [1, 2, 9, 33, 65])
    def test_latents_are_the_references_and_other_slots_keep_their_bits(
        self, layers: int, width: int, rows: int, nodes: int
    ) -> None:
        if layers * rows * nodes * width > 2**28:
            layers = 3
        g = torch.Generator("cuda").manual_seed(0)
        total = rows * nodes + 40
        bits = torch.randint(-(2**15), 2**15, (layers, total, width), device="cuda", generator=g, dtype=torch.int16)
        slots = torch.randperm(total, device="cuda", generator=g)[: rows * nodes].view(rows, nodes)
        path, counts = self.paths(rows, nodes, rows * 100 + nodes)
        want = ref.compact(bits, slots, path, counts)
        cache = bits.clone().view(torch.bfloat16)
        op.commit_latents(cache, slots, path, counts)
        assert torch.equal(cache.view(torch.int16), want)

    def test_rows_beyond_the_count_are_not_touched_and_prompt_chunks_move_nothing(self) -> None:
        bits = torch.randint(-(2**15), 2**15, (4, 600 * 3, 64), device="cuda", dtype=torch.int16)
        slots = torch.randperm(1800, device="cuda").view(3, 600)
        path = torch.arange(600, device="cuda").repeat(3, 1)
        path[1, :3] = torch.tensor([0, 4, 9])
        path[2, :3] = torch.tensor([0, 1 << 40, 1 << 41])
        counts = torch.tensor([600, 3, 3], device="cuda")
        want = ref.compact(bits, slots[:2], path[:2], counts[:2])
        cache = bits.clone()
        op.commit_latents(cache, slots, path, counts, rows=torch.tensor([2], dtype=torch.int32, device="cuda"))
        assert torch.equal(cache, want)

    def test_offsets_past_two_to_the_31(self) -> None:
        slots_total = 2_100_000
        cache = torch.zeros(2, slots_total, 576, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(slots_total - 9, slots_total, device="cuda")[None].contiguous()
        cache[:, -9:] = torch.randn(2, 9, 576, device="cuda").to(torch.bfloat16)
        path, counts = torch.tensor([[0, 3, 8]], device="cuda"), torch.tensor([3], device="cuda")
        want = cache[:, -9:][:, [0, 3, 8, 3, 4, 5, 6, 7, 8]].clone()
        op.commit_latents(cache, slots, path, counts)
        assert torch.equal(cache[:, -9:], want)
        assert not cache[:, :-9].any()

    def test_graph_replays_move_the_path_of_the_moment(self) -> None:
        cache = torch.zeros(61, 4096, 576, dtype=torch.bfloat16, device="cuda")
        first = torch.randn(61, 4096, 576, device="cuda").to(torch.bfloat16)
        slots = torch.randperm(4096, device="cuda")[: 32 * 33].view(32, 33)
        path, counts = self.paths(32, 33, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.commit_latents(cache, slots, path, counts)
        for seed in range(50):
            new_path, new_counts = self.paths(32, 33, seed)
            path.copy_(new_path)
            counts.copy_(new_counts)
            cache.copy_(first)
            graph.replay()
            if seed % 10 == 0:
                assert torch.equal(cache, ref.compact(first, slots, path, counts))
