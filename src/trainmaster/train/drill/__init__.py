"""Drill: a run is killed, damaged and resumed, and compared with an undisturbed run.

plan.py plans it, run.py runs it, record.py reads what an attempt left, judge.py compares, failpoints.py kills. No torch
here: the agent starts the ranks, as in every job.
"""
