"""Rows through ops over pictures, (N, channels, y, x): each of N pictures is taken by itself.

So T or R may be N, and nothing else: between places of one picture, and between its channels, they
mix. A convolution may go along T too, if no row sees one behind the last.
"""

from __future__ import annotations

from fngraph.fx.nodes import operands
from fngraph.fx.rows.state import Kept, Mixes, OpCall, moving_dims, ndim

APART = {  # op -> rank of its operands, where N is in front
    **dict.fromkeys(("upsample_linear1d", "upsample_nearest1d", "_upsample_nearest_exact1d",
                     "reflection_pad1d", "replication_pad1d", "col2im"), 3),
    **dict.fromkeys(("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
                     "_upsample_bicubic2d_aa", "upsample_nearest2d", "_upsample_nearest_exact2d",
                     "avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d",
                     "adaptive_max_pool2d", "pixel_shuffle", "pixel_unshuffle", "grid_sampler_2d",
                     "reflection_pad2d", "replication_pad2d", "im2col"), 4),
    **dict.fromkeys(("upsample_trilinear3d", "upsample_nearest3d", "_upsample_nearest_exact3d",
                     "avg_pool3d", "max_pool3d_with_indices", "_adaptive_avg_pool3d",
                     "grid_sampler_3d", "reflection_pad3d", "replication_pad3d"), 5),
}  # fmt: skip


def apart(call: OpCall) -> Kept:
    """Resizing, pooling, cutting out, ...: right where T or R counts pictures."""
    for x in operands(call.node):
        along = [d for d in moving_dims(x) if d > 0 or ndim(x) != APART[call.name]]
        if along:
            raise Mixes(
                f"takes {call.name} over {call.dim(x, along[0])}, and a key has rows of padding "
                "there. Let T or R count pictures, in front of channels and places: (R, C, y, x)"
            )
    return Kept()


def convolution(call: OpCall) -> Kept:
    """Along T only where no row sees one behind the last: padded in front, by F.pad."""
    x, w = call.args["input"], call.args["weight"]
    moving = [d for d in moving_dims(x) if d > 0]
    if moving_dims(w) or (moving and (call.args["transposed"] or any(call.args["padding"]))):
        raise Mixes(
            "convolves over T, and its last true row sees padding. Pad in front alone: "
            "F.pad(x, (kernel - 1, 0)), with padding=0"
        )
    return Kept()
