"""Metrics of a run: rates, scalars from the device, trackers."""
