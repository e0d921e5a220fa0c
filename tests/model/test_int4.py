"""INT4: our packing is compressed-tensors' packing, bit for bit, in both directions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.model.int4 import GROUP, pack_codes, pack_int4, unpack_codes, unpack_int4


@pytest.fixture(scope="module")
def library():
    """Four seconds of imports, for the worker that runs these tests alone."""
    return pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")


@given(rows=st.integers(1, 5), words=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_packing_and_unpacking_equal_the_library(library, rows, words, seed):
    values = torch.randint(-8, 8, (rows, words * 8), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = pack_codes(values)
    assert packed.dtype == torch.int32 and torch.equal(packed, library.pack_to_int32(values, 4))
    assert torch.equal(unpack_codes(packed), values)
    assert torch.equal(library.unpack_from_int32(packed, 4, values.shape), values)


def test_lowest_nibble_is_the_lowest_input():
    values = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 4]])
    assert pack_codes(values).item() & 0xFFFFFFFF == 0xCBA9F810


def test_every_int32_word_survives():
    words = torch.randint(-(1 << 31), 1 << 31, (3, 4, 64), dtype=torch.int32)
    assert torch.equal(pack_codes(unpack_codes(words)), words)


def quantisation_scheme():
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP, dynamic=False)
    return QuantizationScheme(targets=["Linear"], weights=weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("library")
def test_the_librarys_compressor_and_ours_read_each_other(dtype):
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor as Library

    weight = torch.randn(48, 4 * GROUP, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    packed, scale = pack_int4(weight)
    theirs = Library.compress({"weight": weight, "weight_scale": scale}, quantisation_scheme())
    assert theirs["weight_shape"].tolist() == [48, 4 * GROUP]
    # The library rounds weight / scale in bfloat16: on a rounding edge a code may differ by one.
    difference = (unpack_codes(theirs["weight_packed"]) - unpack_codes(packed)).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() < 0.02
    ours = {"weight_packed": packed, "weight_scale": scale.to(dtype), "weight_shape": torch.tensor(weight.shape)}
    back = Library.decompress(ours, quantisation_scheme())["weight"]
    assert torch.equal(back.to(dtype), unpack_int4(packed, scale, dtype))


def test_quantising_is_idempotent_and_close():
    weight = torch.randn(2, 16, 8 * GROUP, generator=torch.Generator().manual_seed(2))
    packed, scale = pack_int4(weight)
    assert packed.shape == (2, 16, GROUP) and scale.shape == (2, 16, 8) and scale.dtype == torch.bfloat16
    back = unpack_int4(packed, scale, torch.float32)
    step = scale.float().repeat_interleave(GROUP, -1)
    assert ((back - weight).abs() <= step * 0.53).all(), "more than half a step (and the scale's own rounding) off"
    again, same = pack_int4(back, scale)
    assert torch.equal(again, packed) and torch.equal(same, scale)
    assert unpack_codes(packed).min() >= -7


def test_a_group_of_zeros_stays_zero():
    packed, scale = pack_int4(torch.zeros(1, GROUP))
    assert torch.equal(unpack_int4(packed, scale, torch.float32), torch.zeros(1, GROUP))


def test_inputs_that_are_no_whole_groups_are_a_programming_error():
    with pytest.raises(ValueError, match="groups of 32"):
        pack_int4(torch.zeros(2, 40))
