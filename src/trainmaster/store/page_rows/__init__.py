"""Rows that only pages read: curves, the figures behind them, search, counts of projects."""
