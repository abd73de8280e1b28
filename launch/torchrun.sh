#!/usr/bin/env bash
# Train on the GPUs of one host or several: one process a GPU, started by torchrun.
#
#   launch/torchrun.sh model=olmoe_1b_7b run.name=olmoe                          # all GPUs of this host
#   GPUS=2 launch/torchrun.sh ...                                                # two of them
#   NODES=4 RENDEZVOUS=host0:29500 launch/torchrun.sh ...                        # the same line on each of 4 hosts
#
# Before the first run: python -m launch.preflight ... says whether it fits, python -m launch.doctor looks a host over.
# Everything after the script's name goes to train.py. All hosts must see one run folder (run.root) and one data.root.
set -euo pipefail
cd "$(dirname "$0")/.."

NODES=${NODES:-1}
RENDEZVOUS=${RENDEZVOUS:-}
JOB=${JOB:-gristmill}
if [ -z "${GPUS:-}" ]; then
  # A line a GPU; where it fails it says so on stdout too, and a driver that hangs never answers.
  GPUS=$(timeout -k 5 30 nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)
  if [ "$GPUS" -eq 0 ]; then
    echo "error: nvidia-smi lists no GPU here; set GPUS=N for the number of processes on this host" >&2
    exit 1
  fi
fi
for knob in GPUS NODES; do
  if ! [[ ${!knob} =~ ^[1-9][0-9]*$ ]]; then
    echo "error: $knob=${!knob} is not a number of at least 1" >&2
    exit 1
  fi
done
if [ "$NODES" -gt 1 ] && [ -z "$RENDEZVOUS" ]; then
  echo "error: NODES=$NODES needs RENDEZVOUS=HOST:PORT, the same on every host" >&2
  exit 1
fi

# torchrun would set one thread a process; the run sets its own (train.num_threads).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# After a signal the run finishes its step and saves, which may take longer than the 30 s that torchrun waits for it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

if [ "$NODES" -eq 1 ]; then
  exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$GPUS" train.py "$@"
fi
exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc_per_node "$GPUS" --rdzv_backend c10d \
  --rdzv_endpoint "$RENDEZVOUS" --rdzv_id "$JOB" train.py "$@"
