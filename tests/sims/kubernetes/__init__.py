"""Stand-ins on a real Kubernetes API server: the operators' controllers, the scheduler and the kubelets.

operator.py  pods and conditions of PyTorchJob and HyperPodPyTorchJob     kubelet.py  the logs of pods, over TLS
script.py    the output of a simulated training run, with faults
"""
