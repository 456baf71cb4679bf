"""What each table is made by: a function ``table_NAME``, or what was printed once."""

from functools import partial

from . import _learning, _links, _predicted, _timed, _trainings, _words
from ._data import printed

# Tables of runs of which only what was printed is kept, by the file in docs/data/printed.
PRINTED = {
    "choosing": "embeddings_after_seconds sgd_below_dense",
    "convergence": "convergence_tasks convergence_steps convergence_variants",
    "faults": "faults",
    "learning": "loss_of_longer_runs loss_by_rate other_tasks limits_tried "
    "tried_without_the_limit tried_with_other_moments embeddings_over_links",
    "linear_models": "linear_a9a linear_older_logistic linear_older_svm linear_hosts",
    "network": "network_older network_codecs network_buckets",
    "partitioned_norms": "partitioned_norms_over_links",
    "training": "training_rates",
    "wire": "wire_rates",
}
MADE = {
    name.removeprefix("table_"): function
    for module in (_learning, _links, _predicted, _timed, _trainings, _words)
    for name, function in vars(module).items()
    if name.startswith("table_")
} | {
    name: partial(printed, file, which)
    for file, names in PRINTED.items()
    for which, name in enumerate(names.split())
}
