"""Steps that check themselves: a share of them runs a second time through bare `forward`."""
