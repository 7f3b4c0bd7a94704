"""The node entry: read the plan, run the checks, run the workload, leave a durable exit record.

    python -m trainmaster.agent [--detach] PLAN.json    run it (and return once it is certain to run)
    python -m trainmaster.agent --kill PLAN.json        end whatever still runs of it

Reading order: __main__ (the command), attempt (the whole way), folder (lock and record), preflight, workload (ranks),
diagnose (why it ended), processes (nothing stays behind).
"""
