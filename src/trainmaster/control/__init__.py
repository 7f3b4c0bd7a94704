"""The control plane: take a job in, move every job on until it is final, keep every line it wrote."""
