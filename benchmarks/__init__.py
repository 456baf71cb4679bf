"""Measurements that the docs report.

Each program is run from the root of the repository:

    python -m benchmarks.local.step_cost --help

- ``local``: time and memory of one process.
- ``training``: what compression does to a training, and what its selections look like.
- ``learning``: loss after the same steps, and after the same time.
- ``gpu``: programs compiled for a GPU without having one, and times on a real one.
- ``network``: words, predicted times, and steps over real sockets.
- ``elastic``: trainings whose workers come and go.
- ``evidence``: claims of the papers and of this library, and whether they hold here.
"""
