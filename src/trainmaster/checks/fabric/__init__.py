"""InfiniBand, RoCE, EFA and NCCL settings: one file per check."""
