#!/usr/bin/env bash
# What needs a GPU, in one go: each step is announced and runs to its end, a table closes, and the exit code is 1 if one
# failed.
#
#   device    what there is
#   tests     the tests marked `gpu`, memory aside
#   memory    the memory tests among them: no [T, T] matrix at 30,000 tokens, a vocabulary of 151,936
#   trainer   a random Qwen of 1.5 B parameters, 32,768 tokens a micro-batch, with MFU; aim: 40 % of the matrix rate
#   job       a trainer and a generator on one GPU, three steps of the toy
#
#   pip install -r requirements.txt && benchmarks/gpu_check.sh          # some minutes on one GPU of 80 GB or more
#   DEVICE=cpu benchmarks/gpu_check.sh                                  # does the script itself work? small, no GPU
#   STEPS="trainer job" PYTHON=python3 benchmarks/gpu_check.sh          # some steps only
#
# Left out: several GPUs, NCCL between them, SGLang. What the job writes goes to a temporary folder, removed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python}
STEPS=${STEPS:-device tests memory trainer job}
export PYTHONPATH=.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
case $DEVICE in
    cuda) small=() ;;
    cpu) small=(--sft_steps 50 --groups 4 --answers 4 --minibatches 2 --max_new_tokens 48 --eval_problems 8) ;;
    *) echo "DEVICE is cuda or cpu, not '$DEVICE'" >&2 && exit 2 ;;
esac

device() {
    if [ "$DEVICE" = cuda ]; then
        nvidia-smi
        # Without this the tests would be skipped, and look well.
        "$PYTHON" -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name())'
    else
        "$PYTHON" -c 'import os, torch; print(os.cpu_count(), "cores, torch", torch.__version__)'
    fi
}

tests() { "$PYTHON" -m pytest -m gpu -k "not memory and not matrix" -s; }

memory() { "$PYTHON" -m pytest -m gpu -k "memory or matrix" -s; }

trainer() {
    if [ "$DEVICE" = cuda ]; then
        "$PYTHON" benchmarks/trainer.py --device cuda --shape 1.5b --tokens 32768 --checkpointing true false
    else
        "$PYTHON" benchmarks/trainer.py --tokens 1024 --steps 2
    fi
}

job() {
    "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 train.py --steps 3 --device "$DEVICE" \
        --engine transformers --runs_dir "$scratch/runs" ${small[@]+"${small[@]}"}
}

table=() failed=0
for step in $STEPS; do
    case $step in
        device | tests | memory | trainer | job) ;;
        *) echo "STEPS has '$step', which is none of: device tests memory trainer job" >&2 && exit 2 ;;
    esac
    printf '\n=== %s\n' "$step"
    begin=$SECONDS code=0
    # A subshell of its own: inside `if` and `||` bash would ignore errors in the middle of a step.
    set +e
    (set -e && "$step")
    code=$?
    set -e
    [ "$code" = 0 ] && word=passed || { word="FAILED ($code)" && failed=1; }
    table+=("$(printf '%-10s %-14s %5d s' "$step" "$word" $((SECONDS - begin)))")
done
printf '\n=== on %s\n' "$DEVICE"
printf '%s\n' "${table[@]}"
exit "$failed"
