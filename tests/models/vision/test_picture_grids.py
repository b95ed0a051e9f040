"""What pictures' grids say of their patches: taps of a learned table, offsets, parts end to end."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import interpolate

from fngraph.models.vision import grids


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize(("cubic", "corners"), [(False, True), (False, False), (True, False)])
def test_taps_are_a_table_resized(merge: int, cubic: bool, corners: bool):
    """As `F.interpolate` resizes it; patches that become a token lie side by side."""
    draw = random.Random(merge)
    for _ in range(6):
        side, h, w = draw.randint(2, 9), *(merge * draw.randint(1, 6) for _ in "hw")
        table = torch.randn(side, side, 5)
        index, weight = grids.taps(h, w, side, merge=merge, cubic=cubic, corners=corners)
        assert index.shape == weight.shape == (h * w, 16 if cubic else 4)
        found = (table.flatten(0, 1)[index] * weight[..., None]).sum(1)
        how = "bicubic" if cubic else "bilinear"
        whole = interpolate(table.permute(2, 0, 1)[None], (h, w), mode=how, align_corners=corners)
        want = whole[0].permute(1, 2, 0).flatten(0, 1)[grids.merged_order(h, w, merge)]
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_patches_of_one_picture_are_not_copied():
    alone, other = torch.randn(4, 3), torch.randn(2, 3)
    assert grids.joined([alone]).data_ptr() == alone.data_ptr()
    assert grids.joined([alone, other]).tolist() == alone.tolist() + other.tolist()


def test_offsets_begin_with_0_and_end_with_all():
    starts = grids.offsets(n for n in (3, 0, 4))
    assert starts.tolist() == [0, 3, 3, 7] and starts.dtype == torch.int32
    assert grids.offsets([]).tolist() == [0]
