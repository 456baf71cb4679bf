"""Tables that explain: in them are formulas, settings, names and sentences, and no measurements.

Or their numbers are those of a program that another test compares with the page.
"""

# By page, the beginning of the first line.
EXPLAINING = {
    "README.md": ["| | |"],
    "docs/allreduces.md": ["| algorithm | use it when |"],
    "docs/data_cache.md": ["| step | where |", "| | |"],
    "docs/design.md": ["| message | slots |", "| bits over MPI |"],
    "docs/extending.md": ["| of a selector |", "| of an allreduce |"],
    "docs/faults.md": ["| what happens |"],
    # tests/test_gpu_programs.py
    "docs/gpu.md": ["| program | launches |", "| reduction |"],
    "docs/linear_models.md": ["| part | what it does |"],
    "docs/low_rank.md": ["| | words in a step |"],
    "docs/multihost.md": ["| started by |"],
    "docs/network.md": ["| method | what it is |", "| column |", "| network | alpha |"],
    "docs/papers.md": ["| what the papers have |", "| paper, item |"],
    # tests/test_docs_planner.py
    "docs/planner.md": ["| algorithm | lower |", "| whole optimizer |"],
    "docs/quick-start.md": ["| in `info` |"],
    "docs/selectors.md": ["| system | composition |"],
    "docs/sharp-bits.md": ["| what you see |", "| word | means |"],
    "docs/training.md": ["| wish | option |", "| name | what it says |", "| `optax.adamw` |"],
    "docs/wire.md": ["| codec | words per pair |", "| | narrow16 |"],
    # tests/optax_ext/test_works_with.py
    "docs/works_with.md": ["| combination |"],
    # tests/test_evidence.py
    "docs/evidence/index.md": ["| verdict |", "| claim | source |"],
}
