"""Models of the acceptance test, under their earlier names."""
