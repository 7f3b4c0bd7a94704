"""Operations over many nodes: gather, compare, evidence, collectives, isolate, remedy, history."""
