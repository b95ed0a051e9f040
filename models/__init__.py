"""Models as pure functions over pytrees, and the programs that train, serve and show them."""
