"""`python -m trainmaster` is the command `trainmaster`."""

from trainmaster.cli import interrupt


def run() -> None:
    """The console script. The command line is imported here, after Ctrl-C has its meaning: that takes a while."""
    interrupt.leave_at_once()
    from trainmaster.cli import main

    main.run()


if __name__ == "__main__":
    run()
