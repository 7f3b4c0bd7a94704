"""Documents that people write, read at the border into plain values."""
