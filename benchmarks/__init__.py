"""Measurements that the docs report.

Each program is run from the root of the repository:

    python -m benchmarks.local.step_cost --help

- ``local``: time and memory of one process.
- ``training``: what compression does to a training, and what its selections look like.
- ``learning``: loss after the same steps, and after the same time.
- ``gpu``: what is compiled for a GPU that is not there, and times on one that is.
- ``network``: words, predicted times, and steps over real sockets.
"""
