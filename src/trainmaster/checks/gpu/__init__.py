"""The GPUs as the driver, the bus and the kernel log describe them: one file per check."""
