"""The crash matrix: ranks killed at every named place, checkpoints damaged in eight ways, and what comes of the run."""
