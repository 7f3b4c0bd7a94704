"""Forms in which bytes and requests travel between machines."""
