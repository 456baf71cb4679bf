"""What each table is made by."""

from functools import partial

from . import (
    _balance,
    _costs,
    _fill_in,
    _gpu,
    _learning,
    _links,
    _predicted,
    _timed,
    _trainings,
    _words,
)
from ._data import printed

# Tables of runs of which only what was printed is kept, by the file in docs/data/printed.
PRINTED = {
    "choosing": ("embeddings_after_seconds", "sgd_below_dense"),
    "convergence": ("convergence_tasks", "convergence_steps", "convergence_variants"),
    "faults": ("faults",),
    "learning": (
        "loss_of_longer_runs",
        "loss_by_rate",
        "other_tasks",
        "limits_tried",
        "tried_without_the_limit",
        "tried_with_other_moments",
        "embeddings_over_links",
    ),
    "linear_models": ("linear_a9a", "linear_older_logistic", "linear_older_svm", "linear_hosts"),
    "network": ("network_older", "network_codecs", "network_buckets"),
    "partitioned_norms": ("partitioned_norms_over_links",),
    "training": ("training_rates",),
    "wire": ("wire_rates",),
}
MADE = {
    "first_steps": _costs.first_steps,
    "loss_after_seconds": _learning.over_links_short,
    "shares_of_the_bound": _words.shares_of_the_bound,
    "step_cost": _costs.steps,
    "speedups": _links.of_all_runs,
    "words": partial(_words.multiples, _words.ALGORITHMS, (2, 3, 6, 16, 48, 100, 384, 1024)),
    "words_in_short": partial(_words.multiples, _words.SHORT, (2, 6, 16, 48, 384)),
    "words_by_codec": _words.by_codec,
    "where_the_bound_holds": _words.where_the_bound_holds,
    "network_4_100mbit": partial(_links.of_run, "network_4_third.json", "100mbit"),
    "network_4_1gbit": partial(_links.of_run, "network_4_third.json", "1gbit"),
    "network_4_runs": _links.medians,
    "network_8": partial(_links.of_run, "network_8.json", "1gbit"),
    "network_parts": _links.parts,
    "short_of_cores": _links.short_of_cores,
    "scaling": _predicted.scaling,
    "shared_cores": _predicted.sharing,
    "sites": _timed.sites,
    "linear_url_logistic": partial(_timed.linear, "logistic"),
    "linear_url_svm": partial(_timed.linear, "svm"),
    "partitioned_norms": _timed.norms,
    "data_cache": _timed.cache,
    "selector_times": _timed.selectors,
    "gpu_programs": _gpu.programs,
    "gpu_overlaps": _gpu.overlaps,
    "memory": _costs.memory,
    "loss_after_steps": _learning.steps,
    "limit": _learning.limits,
    "loss_over_links": _learning.over_links,
    "fill_in_uniform": _fill_in.uniform,
    "fill_in_trainings": _fill_in.trainings,
    "fill_in_predicted": _fill_in.predicted,
    "regions": _balance.regions,
    "regions_recorded": _balance.regions_recorded,
    "regions_large": _balance.regions_large,
    "concentrations": _balance.concentrations,
    "split": _balance.split,
    "balancing": _balance.allgather,
    "selector_quality": _trainings.quality,
    "paper_counts": _trainings.paper_counts,
    "missing_rows": _trainings.missing,
    **{
        name: partial(printed, file, which)
        for file, names in PRINTED.items()
        for which, name in enumerate(names)
    },
}
