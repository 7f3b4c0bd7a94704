"""Facts of other people's systems that both halves need."""
