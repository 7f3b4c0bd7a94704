"""Every launcher's environment gives the right place, and no half-set one gives any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.core.errors import UsageError
from trainmaster.node.ranks import Ranks, detect, expand_hosts

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **MASTER}
MPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1", **MASTER,
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_NODELIST": "n[07-08]", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
PET = {
    "PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "29400",
}  # fmt: skip
KUBEFLOW = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", **MASTER}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4", **MASTER,
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2",
    "PMI_RANK": "5", "PMI_SIZE": "8", **MASTER,
}  # fmt: skip
JSRUN = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4", "PMIX_RANK": "5", **MASTER,
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}


def without(env: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in env.items() if key != name}


def place(ranks: Ranks) -> tuple[object, ...]:
    return (ranks.launcher, ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size,
            ranks.node_rank, ranks.nodes, ranks.master_addr, ranks.master_port)  # fmt: skip


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("single", 0, 1, 0, 1, 0, 1, None, None)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, ("single", 0, 1, 0, 1, 0, 1, None, None)),  # salloc
        (TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        # nodes of unequal size: torchrun says how many groups there are
        (
            {**TORCHRUN, "WORLD_SIZE": "7", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"},
            ("torchrun", 5, 7, 1, 3, 1, 2, "10.0.0.1", 29500),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, ("torchrun", 0, 1, 0, 1, 0, 1, None, None)),
        # the innermost launcher wins: torchrun inside a Slurm task, a pod, an MPI rank, a SageMaker host
        ({**SLURM, **TORCHRUN}, ("torchrun", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({**PET, **MPI, **SAGEMAKER, **TORCHRUN}, ("torchrun", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        (MPI, ("mpi", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({**SLURM, **MPI}, ("mpi", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({**SAGEMAKER, **MPI}, ("mpi", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        # MPICH and Intel MPI (Hydra), MVAPICH 2 and 3, IBM's jsrun
        (HYDRA, ("mpich", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({**HYDRA, "I_MPI_HYDRA_UUID": "7", "PMI_FD": "9"}, ("mpich", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        (MVAPICH, ("mvapich", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({name.replace("MV2", "MVP"): word for name, word in MVAPICH.items()},
         ("mvapich", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        (JSRUN, ("jsrun", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        # Flux, also in an allocation of Slurm; inside its task Open MPI is the inner launcher
        (FLUX, ("flux", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({**SLURM, **FLUX}, ("flux", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({**FLUX, **MPI}, ("mpi", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        # Hydra starts its proxies with srun; srun's own PMI has no local rank, and PMIx under srun is Slurm's
        ({**SLURM, **HYDRA}, ("mpich", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        ({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("slurm", 3, 4, 1, 2, 1, 2, "n07", 23456)),
        ({**SLURM, "PMIX_RANK": "3"}, ("slurm", 3, 4, 1, 2, 1, 2, "n07", 23456)),
        # on one machine the rendezvous has torchrun's default; on SageMaker it is the first host
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            ("mpi", 1, 4, 1, 4, 0, 1, "localhost", 29500),
        ),
        (
            {name: word for name, word in {**SAGEMAKER, **MPI}.items() if not name.startswith("MASTER")},
            ("mpi", 5, 8, 1, 4, 1, 2, "algo-1", 7777),
        ),
        # documented defaults where no other launcher is seen
        ({"LOCAL_RANK": "0"}, ("torchrun", 0, 1, 0, 1, 0, 1, None, None)),
        ({"RANK": "0"}, ("torchrun", 0, 1, 0, 1, 0, 1, None, None)),
        ({"WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0, 1, 0, 1, None, None)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0, 1, 0, 1, None, None)),
        (MASTER, ("single", 0, 1, 0, 1, 0, 1, None, None)),
        ({"MASTER_ADDR": "localhost"}, ("single", 0, 1, 0, 1, 0, 1, None, None)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ("torchrun", 1, 2, 1, 2, 0, 1, "localhost", 29500)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
            ("torchrun", 1, 2, 1, 2, 0, 1, "127.0.0.1", 29511),
        ),
        (without(TORCHRUN, "MASTER_PORT"), ("torchrun", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500)),
        (without(KUBEFLOW, "MASTER_PORT"), ("kubeflow", None, None, None, None, 1, 3, "job-master-0", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"},
         ("kubeflow", None, None, None, None, 0, 1, "localhost", 29500)),
        (SLURM, ("slurm", 3, 4, 1, 2, 1, 2, "n07", 23456)),
        ({**SLURM, **MASTER}, ("slurm", 3, 4, 1, 2, 1, 2, "10.0.0.1", 29500)),
        # a step smaller than its job; its own numbers count
        (
            {**SLURM, "SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[07-08]",
             "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1",
             "SLURM_PROCID": "2", "SLURM_LOCALID": "0"},
            ("slurm", 2, 3, 0, 1, 1, 2, "n07", 23456),
        ),
        # cyclic distribution: Slurm tells the node, so ranks need not follow each other
        ({**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, ("slurm", 1, 4, 0, 2, 1, 2, "n07", 23456)),
        (
            {"SLURM_STEPID": "0", "SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0",
             "SLURM_NODELIST": "x"},
            ("slurm", 0, 1, 0, 1, 0, 1, "x", None),
        ),
        # the batch script of a job with one task is a single process
        (
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"},
            ("single", 0, 1, 0, 1, 0, 1, None, None),
        ),
        (PET, ("pet", None, 32, None, 8, 2, 4, "job-0", 29400)),
        ({**PET, "PET_NPROC_PER_NODE": "auto"}, ("pet", None, None, None, None, 2, 4, "job-0", 29400)),
        ({"PET_NNODES": "1"}, ("pet", None, None, None, None, 0, 1, None, None)),
        # PyTorchJob sets both families; WORLD_SIZE counts pods, or pods × processes
        ({**PET, "RANK": "2", "WORLD_SIZE": "4"}, ("pet", None, 32, None, 8, 2, 4, "job-0", 29400)),
        ({**PET, "RANK": "2", "WORLD_SIZE": "32"}, ("pet", None, 32, None, 8, 2, 4, "job-0", 29400)),
        (KUBEFLOW, ("kubeflow", None, None, None, None, 1, 3, "job-master-0", 23456)),
        (SAGEMAKER, ("sagemaker", None, 16, None, 8, 1, 2, "algo-1", 7777)),
        ({**SAGEMAKER, "SM_MASTER_ADDR": "algo-1.x", "SM_MASTER_PORT": "7000"},
         ("sagemaker", None, 16, None, 8, 1, 2, "algo-1.x", 7000)),
        ({**SAGEMAKER, **MASTER}, ("sagemaker", None, 16, None, 8, 1, 2, "10.0.0.1", 29500)),
        ({"SM_HOSTS": '["algo-1"]'}, ("sagemaker", None, None, None, None, 0, 1, "algo-1", 7777)),
        ({"SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "4"}, ("sagemaker", None, 4, None, 4, 0, 1, "algo-1", 7777)),
        ({"SM_MASTER_ADDR": "algo-1"}, ("sagemaker", None, None, None, None, 0, 1, "algo-1", 7777)),
        ({**SAGEMAKER, "SM_NUM_GPUS": "0"}, ("sagemaker", None, 2, None, 1, 1, 2, "algo-1", 7777)),
    ],
)  # fmt: skip
def test_place(env: dict[str, str], expected: tuple[object, ...]) -> None:
    assert place(detect(env)) == expected


@pytest.mark.parametrize(
    ("env", "names"),
    [
        (without(TORCHRUN, "RANK"), ["RANK"]),
        (without(TORCHRUN, "WORLD_SIZE"), ["WORLD_SIZE"]),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), ["LOCAL_WORLD_SIZE"]),
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR"]),
        ({**without(TORCHRUN, "MASTER_ADDR"), "MASTER_PORT": "1"}, ["MASTER_ADDR"]),
        ({**TORCHRUN, "RANK": "8"}, ["rank"]),
        ({**TORCHRUN, "RANK": "6"}, ["RANK=6", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
        ({**TORCHRUN, "RANK": "one"}, ["RANK='one'"]),
        ({**TORCHRUN, "RANK": ""}, ["RANK is empty"]),
        ({**TORCHRUN, "WORLD_SIZE": "7"}, ["WORLD_SIZE=7", "LOCAL_WORLD_SIZE=4"]),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, ["0"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "16", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"},
            ["8 ranks in", "16 of them"],
        ),
        ({**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, ["8 ranks in all", "4 of", "GROUP_WORLD_SIZE"]),
        ({**TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "6"}, ["8 ranks in all", "6 nodes", "GROUP_WORLD_SIZE"]),
        ({**TORCHRUN, "GROUP_RANK": "2"}, ["node rank 2 of 2"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1"]),
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK"]),
        ({"MASTER_PORT": "x"}, ["MASTER_PORT"]),
        ({"LOCAL_WORLD_SIZE": "8"}, ["LOCAL_WORLD_SIZE"]),
        (without(HYDRA, "PMI_SIZE"), ["PMI_SIZE"]),
        (without(HYDRA, "MPI_LOCALRANKID"), ["MPI_LOCALRANKID"]),
        ({**HYDRA, "RANK": "0"}, ["RANK=0"]),
        (without(MVAPICH, "MV2_COMM_WORLD_LOCAL_SIZE"), ["MV2_COMM_WORLD_LOCAL_SIZE"]),
        (without(JSRUN, "JSM_NAMESPACE_SIZE"), ["JSM_NAMESPACE_SIZE"]),
        (without(JSRUN, "MASTER_PORT"), ["MASTER_PORT"]),
        ({"PMIX_RANK": "3"}, ["PMIX_RANK=3", "WORLD_SIZE"]),
        ({"PALS_RANKID": "3"}, ["PALS_RANKID=3"]),
        ({"ALPS_APP_PE": "3"}, ["ALPS_APP_PE=3"]),
        ({"PMI_ID": "3"}, ["PMI_ID=3"]),
        ({"FLUX_TASK_RANK": "0"}, ["FLUX_JOB_SIZE"]),
        ({**FLUX, "FLUX_JOB_NNODES": "3"}, ["FLUX_JOB_SIZE=8", "FLUX_JOB_NNODES=3"]),
        ({**FLUX, "FLUX_TASK_LOCAL_ID": "0"}, ["FLUX_TASK_RANK=5", "FLUX_TASK_LOCAL_ID=0"]),
        (without(FLUX, "MASTER_ADDR"), ["MASTER_ADDR"]),
        (without(MPI, "OMPI_COMM_WORLD_SIZE"), ["OMPI_COMM_WORLD_SIZE"]),
        (without(MPI, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_RANK"]),
        (without(MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        (without(MPI, "MASTER_ADDR"), ["MASTER_ADDR"]),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, ["OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_LOCAL_RANK=2"]),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, ["OMPI_COMM_WORLD_SIZE=8", "OMPI_COMM_WORLD_LOCAL_SIZE=3"]),
        ({**MPI, "RANK": "0"}, ["RANK=0", "LOCAL_RANK"]),
        (without(SLURM, "SLURM_STEP_ID"), ["SLURM_NTASKS=4", "SLURM_STEP_ID", "srun"]),
        (without(SLURM, "SLURM_NTASKS"), ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]),
        (without(SLURM, "SLURM_LOCALID"), ["SLURM_LOCALID"]),
        (without(SLURM, "SLURM_NODEID"), ["SLURM_NODEID"]),
        (without(SLURM, "SLURM_NODELIST"), ["SLURM_NODELIST"]),
        (without(SLURM, "SLURM_TASKS_PER_NODE"), ["SLURM_TASKS_PER_NODE"]),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2(x3)"}, ["SLURM_TASKS_PER_NODE=2(x3)"]),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2;2"}, ["SLURM_TASKS_PER_NODE=2;2"]),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "9" * 5000}, ["SLURM_TASKS_PER_NODE=999", "such as 2(x3),1"]),
        ({**SLURM, "SLURM_TASKS_PER_NODE": f"2(x{'9' * 5000})"}, ["SLURM_TASKS_PER_NODE=2(x999", "such as 2(x3),1"]),
        ({**SLURM, "SLURM_NODELIST": f"n[1-{'9' * 5000}]"}, ["SLURM_NODELIST: [1-999", "range of numbers"]),
        ({**SLURM, "SLURM_NTASKS": "9" * 5000}, ["SLURM_NTASKS='999", "at most 18 digits"]),
        ({**SLURM, "SLURM_NNODES": "3"}, ["SLURM_NNODES=3", "SLURM_NODELIST"]),
        ({**SLURM, "SLURM_NODEID": "2"}, ["SLURM_NODEID=2"]),
        ({**SLURM, "SLURM_PROCID": "4"}, ["rank 4 of 4"]),
        ({**SLURM, "SLURM_LOCALID": "2"}, ["local rank 2 of 2"]),
        ({**SLURM, "SLURM_NODELIST": "n[7-"}, ["SLURM_NODELIST"]),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "4"}, ["RANK=0"]),
        (without(PET, "PET_NNODES"), ["PET_NNODES"]),
        (without(PET, "PET_NODE_RANK"), ["PET_NODE_RANK"]),
        (without(PET, "PET_MASTER_ADDR"), ["MASTER_ADDR"]),
        ({**PET, "PET_NNODES": "1:4"}, ["PET_NNODES=1:4", "torchrun"]),
        ({**PET, "PET_NODE_RANK": "4"}, ["node rank 4 of 4"]),
        ({**PET, "RANK": "1", "WORLD_SIZE": "4"}, ["RANK=1", "PET_NODE_RANK=2"]),
        ({**PET, "RANK": "2", "WORLD_SIZE": "5"}, ["WORLD_SIZE=5", "PET_NNODES=4"]),
        ({**PET, "PET_NPROC_PER_NODE": "0"}, ["0"]),
        (without(KUBEFLOW, "RANK"), ["RANK"]),
        (without(KUBEFLOW, "WORLD_SIZE"), ["WORLD_SIZE"]),
        (without(KUBEFLOW, "MASTER_ADDR"), ["MASTER_ADDR"]),
        ({**KUBEFLOW, "RANK": "3"}, ["node rank 3 of 3"]),
        (without(SAGEMAKER, "SM_CURRENT_HOST"), ["SM_CURRENT_HOST"]),
        ({"SM_CURRENT_HOST": "algo-2", "SM_MASTER_ADDR": "algo-1"}, ["SM_HOSTS", "SM_MASTER_ADDR=algo-1"]),
        ({**SAGEMAKER, "SM_NUM_GPUS": "x"}, ["SM_NUM_GPUS"]),
        ({**SAGEMAKER, "SM_MASTER_PORT": "70000"}, ["SM_MASTER_PORT=70000"]),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, ["SM_HOSTS=algo-1"]),
        ({**SAGEMAKER, "SM_HOSTS": "[]"}, ["SM_HOSTS=[]"]),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, ["SM_CURRENT_HOST=algo-3"]),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ["OMPI_COMM_WORLD_LOCAL_RANK=1"]),
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, ["MPI_LOCALRANKID=1"]),
        ({"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "4"}, ["FLUX_TASK_LOCAL_ID=1"]),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1"}, ["MV2_COMM_WORLD_LOCAL_RANK=1"]),
        ({"JSM_NAMESPACE_LOCAL_RANK": "1"}, ["JSM_NAMESPACE_LOCAL_RANK=1"]),
        ({"PALS_LOCAL_RANKID": "1"}, ["PALS_LOCAL_RANKID=1"]),
        ({"PMIX_NAMESPACE": "job"}, ["PMIX_NAMESPACE=job"]),
        ({"SLURM_STEPID": "0", "SLURM_NTASKS": "4"}, ["SLURM_STEPID=0"]),
        (without(SLURM, "SLURM_PROCID"), ["SLURM_STEP_ID"]),
        ({"GROUP_RANK": "1"}, ["GROUP_RANK"]),
        ({"NODE_RANK": "0"}, ["NODE_RANK=0"]),
        ({"SLURM_PROCID": "0"}, ["SLURM_PROCID=0", "SLURM_STEP_ID"]),
        ({"SLURM_NTASKS": "1"}, ["SLURM_NTASKS=1"]),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "3"}, ["SLURM_PROCID=3"]),
        ({"GROUP_WORLD_SIZE": "2"}, ["GROUP_WORLD_SIZE"]),
    ],
)
def test_an_environment_that_cannot_be_trusted_is_refused_by_name(env: dict[str, str], names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        detect(env)
    assert all(name in str(caught.value) for name in names), str(caught.value)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3,07-09]", "n1 n2 n3 n07 n08 n09"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a,b-[2,4],c", "a b-2 b-4 c"),
        ("rack[1-2]n[1-2]", "rack1n1 rack1n2 rack2n1 rack2n2"),
        ("gpu[1-2]-ib", "gpu1-ib gpu2-ib"),
        ("node.example.com", "node.example.com"),
    ],
)
def test_hosts_expand(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


NO_LISTS = ["", ",", "n[", "n]", "n[1-2", "n[]", "n[3-1]", "n[a-b]", "n[1,]", "a,,b", "n[1-2][[3]]",
            "n[0-999999999]", "n[0-999]x[0-999]"]  # fmt: skip


@pytest.mark.parametrize("text", NO_LISTS)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_hosts(text)


@given(first=st.integers(0, 500), count=st.integers(1, 50), width=st.integers(0, 5))
def test_a_range_gives_each_host_once_in_order(first: int, count: int, width: int) -> None:
    start, end = str(first).zfill(width), str(first + count - 1).zfill(width)
    expected = [f"n{str(number).zfill(len(start))}" for number in range(first, first + count)]
    assert expand_hosts(f"n[{start}-{end}]") == expected


WORDS = st.sampled_from(["0", "1", "2", "4", "8", "", "x", "-1", "n[1-2]", '["a"]', "a", "auto", "2(x2)"])
NAMES = st.sampled_from(
    sorted({*TORCHRUN, *MPI, *SLURM, *PET, *SAGEMAKER, *HYDRA, *JSRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"})
)


@given(st.dictionaries(NAMES, WORDS))
def test_any_environment_gives_a_place_within_bounds_or_a_refusal(env: dict[str, str]) -> None:
    try:
        ranks = detect(env)
    except UsageError:
        return
    assert 0 <= ranks.node_rank < ranks.nodes
    if ranks.rank is not None:
        assert ranks.world_size is not None
        assert ranks.local_rank is not None
        assert ranks.local_world_size is not None
        assert 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size
        assert ranks.local_rank <= ranks.rank < ranks.world_size
    assert ranks.nodes == 1 or ranks.master_addr
