# What gyre.sbatch and gyre_flat.sbatch have in common; sourced by them, in the repository's directory.
# The lines that it runs come from `launch.py prepare`, which checks the allocation first: setup lines of the
# configuration, one step over all ranks, requeue on the signal.

if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi

if [ "${1:-}" = "--resume" ]; then
    shift
    lines=$("$python" launch.py prepare --resume "$@") || exit $?
else
    lines=$("$python" launch.py prepare "$@") || exit $?
fi
eval "$lines"
