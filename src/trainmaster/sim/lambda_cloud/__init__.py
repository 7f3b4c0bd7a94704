"""A simulator of Lambda Cloud: the vendor's API over HTTP, and instances that are real SSH servers on loopback.

simulator.py   the whole: start, stop, one-off faults, summary
server.py      HTTP: authentication, rate limits, faults of answers
operations.py  one function per operation of the API
cloud.py       instances, SSH keys and file systems of the account
instance.py    one instance: its timeline, status, price and how the API shows it
machine.py     the processes of one instance: sshd, its home folder, its fake nvidia-smi
faults.py      names and rates of faults, drawn by seed
"""
