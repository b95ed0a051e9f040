"""Pictures and progress: the only place that imports rich and matplotlib."""
