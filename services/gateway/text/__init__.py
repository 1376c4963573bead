"""From generated token ids to what a client reads: pure, incremental, the same for every way the tokens arrive."""
