"""Names and data that both halves share: spec, states, events, results, plans, errors. Standard library only."""
