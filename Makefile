# Trainmaster. `make demo` and `make test` do all their own set-up on a machine with Python 3.11+, git and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Test files run in parallel; many of them wait for ranks and servers more than they compute: three keep two cores busy.
# Four took longer, and five no less time, with browsers that ran into their limits (docs/LOG.md).
WORKERS ?= 3
# Which cases of matrices `make test` draws (tests/sampling.py); `make parallel SAMPLE=2026-11-17` repeats those of a day.
SAMPLE  ?= $(shell date -u +%F)
# The tests start hundreds of interpreters: bytecode is written once, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
# What module systems of clusters set: packages of another Python would count as installed, or be imported.
unexport PYTHONHOME PYTHONPATH
export TRAINMASTER_HOME ?= $(CURDIR)/.trainmaster

.PHONY: help demo serve clean test checked timed collected quick parallel alone affected test-both lint types kubernetes system-packages \
	matrices properties fuzz api-fuzz chaos chaos-control chaos-recovery chaos-lambda drill-matrix who-resumes chaos-queue chaos-search queue-traces queue-rules hostile tenant secrets rank-kills owner-kills outages \
	ssh-64 soak-ssh contract-k8s contract-containers images testbed-k8s

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.run ## check this machine, train a small model on it, write the report
	$(BIN)/trainmaster demo

test: checked timed parallel ## set up everything, then lint, types and every test; `make -k test` goes on after a failure

# Beside lint the Kubernetes programs are built, where they are not there: with root a fresh machine tests what every
# other does. The script ends with 3 where they cannot be built; it has said so, and their tests are skipped.
checked:
	@$(MAKE) --no-print-directory -j 3 lint kubernetes collected

# mypy has work for one core. The tests that run one at a time leave one idle, and it takes nothing from them.
timed:
	@$(MAKE) --no-print-directory -j 2 types alone

# Once for all: each worker would compile every test file, and what it imports, by itself. Two halves, for two cores.
collected: $(VENV)/.dev
	@$(BIN)/pytest --collect-only -qq tests/[a-d]*/ > $(VENV)/collected-1.txt & half=$$!; \
	$(BIN)/pytest --collect-only -qq tests/[e-z]*/ tests/test_*.py > $(VENV)/collected-2.txt; rest=$$?; \
	wait $$half && [ $$rest = 0 ] || { cat $(VENV)/collected-*.txt; exit 1; }

kubernetes: system-packages
	@sh tools/build-kubernetes.sh || [ $$? = 3 ]

lint: $(VENV)/.dev ## ruff: style and mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	nice -n 19 $(BIN)/mypy

# Thousands of small folders and databases: in memory where there is a gigabyte for them, since a disk is waited for.
quick: $(VENV)/.dev ## the inner loop, under a minute: no test that is slow or starts a process, a server or a browser
	TMPDIR=$$(sh tools/folder-in-memory.sh) TRAINMASTER_SAMPLE=$(SAMPLE) $(BIN)/pytest -n 2 --dist loadfile -m "not spawns and not slow and not alone"

parallel: $(VENV)/.dev ## every test but those that depend on timing; skipped ones are listed with their reason
	TRAINMASTER_SAMPLE=$(SAMPLE) $(BIN)/pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not alone"

alone: $(VENV)/.dev ## the tests that depend on timing, one at a time
	TRAINMASTER_SAMPLE=$(SAMPLE) $(BIN)/pytest -rs -m alone

affected: $(VENV)/.dev ## the tests whose imports reach a file that differs from main; BASE=HEAD~1 compares with another commit
	@$(BIN)/python tools/affected.py $(or $(BASE),main) -n $(WORKERS) --dist loadfile

matrices: $(VENV)/.dev ## every case of the matrices and proofs of which `make test` draws some
	$(BIN)/pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "(matrix or proof) and not alone"
	$(BIN)/pytest -rs -m "(matrix or proof) and alone"

properties: $(VENV)/.dev ## the property tests with new random cases, 1,000 each where a test states no number
	$(BIN)/pytest -n $(WORKERS) -m "hypothesis and not alone" --hypothesis-profile=search

fuzz: $(VENV)/.dev ## 100,000 damaged inputs for every parser and for the judges; ARGS='--only dcgm --seed 7 --cases 1' repeats one
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

api-fuzz: $(VENV)/.dev ## 6,500 requests made from the API's own document; ARGS='--seed 7 --as viewer' makes others
	PYTHONPATH=tests $(BIN)/python -m web.api_fuzz $(ARGS)

chaos: $(VENV)/.dev ## kill and damage a run in every way; ARGS='--seed 7 --case 31' repeats one case
	PYTHONPATH=tests $(BIN)/python -m train.crash $(ARGS)

chaos-control: $(VENV)/.dev ## kill the control plane at every commit and effect; ARGS='--sample 6' takes some of them
	TRAINMASTER_CRASH_POINTS_EVERY=1 $(BIN)/pytest tests/control/test_crash_points.py
	PYTHONPATH=tests $(BIN)/python -m control.drill $(ARGS)

chaos-recovery: $(VENV)/.dev ## 50 seeded SIGKILL and SIGSTOP of ranks, agents, launchers and the store's host on 2 nodes of this machine; ARGS='--kills 5 --seed 7'; ARGS='--groups 2' of replica groups
	PYTHONPATH=tests:src $(BIN)/python -m agent.recovery_chaos $(ARGS)

chaos-lambda: $(VENV)/.dev ## 200 jobs on simulated Lambda Cloud with every fault, the server killed every few seconds; ARGS='--jobs 20 --seed 7'
	PYTHONPATH=tests $(BIN)/python -m control.rented_chaos $(ARGS)

drill-matrix: $(VENV)/.dev ## eight planted bugs of the resume in three trainers with three seeds each, and 21 healthy runs; ARGS='--trainer lightning --bug data'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[recipes]'
	PYTHONPATH=tests $(BIN)/python -m drill.matrix $(ARGS)

who-resumes: $(VENV)/.dev ## drill trainers of others with their documented settings; writes docs/who-resumes/ and docs/WHO_RESUMES.md
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[recipes]'
	PYTHONPATH=tests $(BIN)/python -m drill.who_resumes $(ARGS)
	$(BIN)/python tools/write_who_resumes.py

chaos-queue: $(VENV)/.dev ## 50 jobs with priorities, a quota, gangs and preemption on 4 GPUs of a stand-in; one server, then two on PostgreSQL, killed every few seconds; ARGS='--jobs 20 --seed 7 --servers 2'
	PYTHONPATH=tests $(BIN)/python -m control.queue_chaos $(ARGS)

chaos-search: $(VENV)/.dev ## a search of 200 trials, the server killed 50 times, beside the same one undisturbed; ARGS='--trials 20 --kills 5 --parallel 4'
	PYTHONPATH=tests $(BIN)/python -m control.search_chaos $(ARGS)

queue-traces: $(VENV)/.dev ## 2,000 seeded traces of our own queue in simulated time, judged by a brute-force model; ARGS='--traces 100 --seed 7'
	PYTHONPATH=tests $(BIN)/python -m queueing.traces $(ARGS)

queue-rules: $(VENV)/.dev ## our queue beside FIFO, SkyPilot's rule, dstack's rule and EASY on a published workload model; ARGS='--jobs 500 --seeds 1'
	PYTHONPATH=tests $(BIN)/python -m queueing.compare $(ARGS)

hostile: $(VENV)/.dev ## 300 misbehaviours of jobs on both databases; ARGS='--seed 7 --count 30' draws others
	PYTHONPATH=tests $(BIN)/python -m hostile $(ARGS)

tenant: $(VENV)/.dev system-packages testbed-k8s ## a hostile project beside another on this machine, sshd, Slurm and kubelets: some 90 attempts on each; needs root
	$(BIN)/pytest -rs tests/hostile/test_tenant.py

test-both: $(VENV)/.dev system-packages ## every test that uses a database on SQLite and on PostgreSQL
	TRAINMASTER_BOTH_DATABASES=1 $(BIN)/pytest -rs -n $(WORKERS) --dist loadfile tests/control tests/store tests/web -m "not alone"

secrets: $(VENV)/.dev ## 42 shapes of secrets in every field of the API; then rows, pages, files, logs and argv are searched
	TRAINMASTER_SECRETS_WHOLE=1 $(BIN)/pytest -s tests/e2e/test_secret_matrix.py

rank-kills: $(VENV)/.dev ## kill a rank at twelve moments: under `attempts: 3` and under torchrun --max-restarts
	TRAINMASTER_KILL_MOMENTS=12 $(BIN)/pytest tests/e2e/test_killed_ranks.py

owner-kills: $(VENV)/.dev system-packages ## kill commands, agents, torchrun and servers at 30 seeded moments, here and over SSH: nothing outlives its owner
	TRAINMASTER_OWNER_KILLS=30 $(BIN)/pytest tests/e2e/test_owner_kills.py

outages: $(VENV)/.dev ## database, storage and disk unavailable for a minute while a job runs
	TRAINMASTER_OUTAGE_S=60 $(BIN)/pytest tests/control/test_outages.py -o timeout=900

ssh-64: $(VENV)/.dev system-packages ## 64 jobs at once on 64 SSH hosts of this machine, with the memory of each; ARGS='--hosts 5'
	PYTHONPATH=tests $(BIN)/python benchmarks/ssh_hosts.py $(ARGS)

contract-k8s: $(VENV)/.dev system-packages testbed-k8s ## the target contract in pods of two real kubelets; needs root
	TRAINMASTER_PROOFS_OF=contract-k8s $(BIN)/pytest tests/targets/test_target_contract.py -k kubernetes

contract-containers: $(VENV)/.dev system-packages testbed-k8s ## every check in real containers with five kinds of rights, jobs in pods of kubelets, ten sick recordings; needs root
	TRAINMASTER_PROOFS_OF=contract-containers $(BIN)/pytest tests/checks/gpu/test_gpu_containers.py tests/checks/gpu/test_gpu_pods.py

images: $(VENV)/.dev system-packages ## build the images of acceptance and SageMaker over Debian and torch, and run them on ten sick recordings; needs root and 8 GB
	PYTHON=$(BIN)/python sh tools/build-base-image.sh
	TRAINMASTER_PROOFS_OF=images $(BIN)/pytest tests/checks/gpu/test_gpu_images.py

testbed-k8s: ## build the Kubernetes programs that the tests use, once: minutes, and 350 MB in ~/.cache/trainmaster
	@sh tools/build-kubernetes.sh

soak-ssh: $(VENV)/.dev system-packages ## 20 minutes of jobs that come and go on SSH hosts, and one watched for two simulated hours; ARGS='--minutes 5'
	PYTHONPATH=tests $(BIN)/python benchmarks/ssh_soak.py $(ARGS)

serve: $(VENV)/.run ## the server and dashboard of this clone's home folder
	$(BIN)/trainmaster serve

system-packages: ## install the system packages that the tests use, where that is allowed
	@sh tools/system-packages.sh

clean: ## remove the virtual environment and this clone's jobs
	rm -rf $(VENV) $(VENV).lock .trainmaster

# Targets of predecessors, by the names that their users type (compat/README.md).
include compat/fsdp-hyperpod/targets.mk

# Programs of a clone that was moved or copied belong to the old place: it is set up anew.
PLACE := $(shell [ -x $(VENV)/bin/python ] && cat $(VENV)/.place 2>/dev/null)
ifneq ($(PLACE),$(CURDIR))
$(VENV)/.run $(VENV)/.dev: moved
.PHONY: moved
endif

# What the commands of README.md need.
$(VENV)/.run: pyproject.toml constraints.txt tools/install.sh
	@echo "installing torch, the server and the SSH client into $(VENV): several minutes the first time"
	PYTHON="$(PYTHON)" sh tools/install.sh $(BIN) train,server,ssh,hf,client
	@touch $@

# HyperPod's own log agent judges our heartbeat lines in a test. Its package pins another torch, so it comes alone.
# torch is compiled here, by all cores: ranks of other accounts could not keep its bytecode.
$(VENV)/.dev: pyproject.toml constraints.txt tools/install.sh
	PYTHON="$(PYTHON)" sh tools/install.sh $(BIN) dev hyperpod-elastic-agent==1.1.3
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python3.*/site-packages/torch || true
	@touch $@ $(VENV)/.run
