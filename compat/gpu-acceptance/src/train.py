"""`trainmaster accept` under its earlier name: torchrun --nproc_per_node=8 train.py --model resnet50."""

import sys

from trainmaster.bench.accept.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
