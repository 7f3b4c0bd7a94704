"""`python -m trainmaster` is the command `trainmaster`."""

from trainmaster.cli.main import run

if __name__ == "__main__":
    run()
