"""Steps that watch themselves: a share of them runs again through bare `forward`; the last ones are
recorded."""
