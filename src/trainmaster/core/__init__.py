"""The words both halves share: spec, states, events, results, plans, errors. Pure, standard library only."""
