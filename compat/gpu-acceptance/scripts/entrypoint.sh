#!/bin/sh
# Entry of the acceptance image. Words that begin with a dash, or none, go to the acceptance test, which finds its rank
# in the variables of torchrun, Slurm, MPI, Kubeflow, SageMaker or a plain loop. Anything else is a command of its own.
# A run without a baseline to judge it by ends with 0: `restartPolicy: OnFailure` would repeat it for ever.
case "${1:--}" in
-*) exec python3 -m trainmaster.bench.accept --allow-unjudged "$@" ;;
*) exec "$@" ;;
esac
