# Tests of a HyperPod cluster. The root Makefile includes this file; compat/fsdp-hyperpod/Makefile does too.
# JOB=NAME and ARGS='--on hyperpod:cluster.yaml' choose another job and cluster.
JOB ?= llama3-1-8b-fsdp-hpto
FSDP_HYPERPOD := $(dir $(lastword $(MAKEFILE_LIST)))
HYPERPOD = $(BIN)/trainmaster cluster test --manifest $(FSDP_HYPERPOD)FSDP/kubernetes/fsdp-hpto.yaml --job-name $(JOB) $(ARGS)

.PHONY: validate-framework validate-setup test-quick test-cluster perf-test run check-job test-status logs-follow \
	logs-all stop monitor-pods debug-describe debug-events

validate-framework: $(VENV)/.run ## HyperPod tests: files, scripts, kubectl and make targets of this clone
	$(BIN)/python $(FSDP_HYPERPOD)tools/validate_test_setup.py

validate-setup: $(VENV)/.run ## HyperPod tests: cluster access, operator, GPU nodes, storage claims, service account
	$(HYPERPOD) --action validate-setup

test-quick: $(VENV)/.run ## HyperPod: deploy, wait for the pods, watch a minute of training, judge, clean up
	$(HYPERPOD) --action quick-test

test-cluster: $(VENV)/.run ## HyperPod: the same for five minutes with every success indicator
	$(HYPERPOD) --action full-test

perf-test: $(VENV)/.run ## HyperPod: throughput and utilisation over ten minutes
	$(HYPERPOD) --action perf-test

run: $(VENV)/.run ## HyperPod: deploy the job of FSDP/kubernetes/fsdp-hpto.yaml and leave it running
	$(HYPERPOD) --action run

check-job: $(VENV)/.run ## HyperPod: status of job, pods and nodes
	$(HYPERPOD) --action status

test-status: check-job ## HyperPod: the same, as JSON

logs-follow: $(VENV)/.run ## HyperPod: follow the logs of all pods until the job is over
	$(HYPERPOD) --action logs --follow

logs-all: $(VENV)/.run ## HyperPod: newest lines of all pods
	$(HYPERPOD) --action logs

stop: $(VENV)/.run ## HyperPod: remove the job, and nothing else
	$(HYPERPOD) --action cleanup

monitor-pods: $(VENV)/.run ## HyperPod: pods as they change, until the job is over
	$(HYPERPOD) --action monitor

debug-describe: $(VENV)/.run ## HyperPod: the job as the cluster has it, its pods and events
	$(HYPERPOD) --action describe

debug-events: $(VENV)/.run ## HyperPod: events of the job's namespace, newest last
	$(HYPERPOD) --action events
