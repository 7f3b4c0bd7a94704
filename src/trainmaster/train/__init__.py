"""The FSDP trainer. `python -m trainmaster.train CONFIG.json` is one rank; start reading in loop.py."""
