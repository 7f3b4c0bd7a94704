"""Rows that only pages and /metrics read: curves, the figures behind them, search, records, tallies, queue depths."""
