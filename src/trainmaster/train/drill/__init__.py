"""The drill: a run is killed, damaged and resumed, and what came of it is compared with a run that nobody disturbed.

plan.py says what will happen, record.py reads what an attempt left behind, judge.py compares, run.py does it. No torch
here: ranks are started by the agent, as every user's are.
"""
