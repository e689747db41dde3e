"""The trainer child of a cell: the same program for the core and for satellites. The one importer of deepspeed.

    python -m gyre.training.trainer            (spawned with `gyre.child.Child`; OMP_NUM_THREADS = train.threads and,
                                                on a GPU cell, CUDA_VISIBLE_DEVICES are set by the parent)

It stays alive across role changes. Operations, their arguments and what they return (times in seconds, sizes in
bytes); an operation that fails is answered with an error, and its effect on an update is nil (invariant 8):

start(run_dir, attempt, rank, incarnation, store=[host, port], prefix, secret, model, address, scratch)
    Builds the model of directory `model` under the run directory's configuration, and parks. Rank 0 is the core: it
    loads the latest commit (or the model's weights where there is none), wraps them in DeepSpeed, and writes and
    announces snapshot `version * updates_per_batch`. A satellite has no weights before its first update. `prefix` is
    that of the store's keys, `address` this node's, as other ranks reach it. On a GPU where `cells.gpus` > 0.
    -> {"seconds", "parameters", "version", "snapshot", "checksum"}     (the last three from the core alone)
wake()       take device memory back, before the first train after a park -> {"seconds"}
park()       give device memory back: a satellite's weights, gradients and accumulators; the core's gradients and
             accumulators (and on a GPU its weights and optimizer state go to CPU memory); a partial sum of a
             suspended update is kept. A no-op while parked -> {"seconds"}
groups(generation, ranks)
    The process groups of this generation are those of `ranks` (all living cells, in prefix order). -> {}
train(update, position, generation, members)
    This cell's part in an update; it returns when that is over. `position` is this cell's place in the prefix (0: the
    core), `members` are the ranks of the generation in prefix order. Wakes by itself where wake was not called.
    Satellites need not wait for UpdateOpened. For the core
    -> {"how": "done", "members": k, "micro_steps": {rank: count}, "snapshot", "checksum", "seconds",
        "metrics": {"loss", "grad_norm", "tokens", "weight", "clip_fraction", "ratio_mean", "kl", "entropy",
                    "seconds_compute", "seconds_wait", "seconds_reduce", "seconds_step", "seconds_snapshot"}}
       or {"how": "suspended", "members": k}: train the same update again to go on, its partial sum is kept
    For a satellite -> {"how": "done" | "suspended" | "missed" | "failed", "micro_steps": count, "detail"}
       missed: the window had closed, it took no part; failed: it was barred, its micro-steps went to others.
commit(version, update, cursor)
    Core only, after the last update of a batch: makes policy `version` durable with `cursor` (any JSON) beside it.
    -> {"version", "update", "checksum", "bytes", "seconds"}
memory()     -> {"weights", "gradients", "accumulators", "optimizer", "rss", "pss"}, bytes held now
checksum()   -> {"checksum", "snapshot"} of the weights held now (`gyre.checksum`); snapshot -1 where there are none
stop()       removes this process's shared memory; the process ends when the parent closes -> {}

Events: {"type": "opened", "update"}             the core opened the stream (or opened it again)
        {"type": "joined", "update", "position"} this satellite is in
        {"type": "progress", "update", "micro_steps", "tokens"}     after each micro-step; totals of this member
        {"type": "stage", "stage", "update"}     pulling, training, waiting, reducing, stepping, writing; for people

It connects to the store itself, with `Store.connect(prefix, host, port)`, and finds the feeder's URL in the store
word `feeder` and the weight server's in `snapshots`. Shared memory is named `gyre-<run>-<attempt>-*` in /dev/shm.
"""
