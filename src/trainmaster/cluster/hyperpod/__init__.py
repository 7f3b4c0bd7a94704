"""Tests of a HyperPod cluster: a training job is deployed, watched, judged and removed.

manifest.py    the manifest that users edit       fit.py         the manifest for the nodes found, and its times
logs.py        measurements from the logs of pods  pods.py        pods and their logs, read from the cluster
indicators.py  success indicators, judged         objects.py     the objects of a test in the cluster, and no others
run.py         deploy, wait, watch, judge, remove  status.py      status of job and nodes, readiness of the cluster
"""
