"""Acceptance of a cluster by training: one run, a suite of measurements, files to run it elsewhere."""
