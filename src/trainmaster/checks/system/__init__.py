"""CPU, memory, disks, clock and kernel: one file per check."""
