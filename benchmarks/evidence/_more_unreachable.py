"""More claims that take a cluster, GPUs or data that cannot be had here, each with the reason."""

from ._claims import unchecked

CLAIMS = (
    unchecked(
        "sparcml/cifar-time",
        "Training ResNet-110 on CIFAR-10 to the end is 1.12 times as fast on 8 nodes.",
        "SparCML, section 8.3",
        "1.12",
        "CIFAR-10 and 8 nodes with GPUs, whose computing decides it",
    ),
    unchecked(
        "sparcml/resnet-50",
        "ResNet-50 gains 6 % on 64 nodes only: gradients become dense as they are added up.",
        "SparCML, section 8.4",
        "2,071 s an epoch against 1,950 s: 1.06",
        "ImageNet and 64 GPUs; how sums become dense: `sparcml/fill-in-grows`",
    ),
    unchecked(
        "adtopk/bandwidth",
        "ADTopk has the highest throughput of seven methods at 1, 10 and 25 Gbit/s.",
        "ADTopk, experiment 6, Figure 14",
        "highest in all three",
        "the time of a selection on a GPU decides it: 8 nodes with GPUs",
    ),
    unchecked(
        "adtopk/density",
        "ADTopk's throughput is 58 to 211 % above five others at densities of 10, 5 and 1 %.",
        "ADTopk, experiment 7, Figure 15",
        "1.58 to 3.11",
        "the time of a selection on a GPU decides it: 8 nodes with GPUs",
    ),
    unchecked(
        "mstopk/top-k-time",
        "An exact top-k of ResNet-50's gradients takes 0.239 s, more than forward and backward "
        "passes, 0.204 s.",
        "MSTopK, section 1, Figure 1",
        "1.17",
        "it is about a V100, and ImageNet; `mstopk/speed` has the selection on a CPU",
    ),
    unchecked(
        "mstopk/data-cache-training",
        "From the second epoch on DataCache makes a training about twice as fast.",
        "MSTopK, section 5.4, Figure 9",
        "about 2",
        "it takes a V100, on which reading is half of a step; on two CPU cores it is 1 % of one, "
        "and a source slow enough to make it half would give any number",
    ),
    unchecked(
        "mstopk/aggregation-time",
        "HiTopKComm aggregates 16-bit gradients faster than NaiveAG, TreeAR and 2DTAR do.",
        "MSTopK, section 5.3, Figure 7",
        "FP16 elements, 128 V100",
        "16 nodes of 8 GPUs; from formulas of 4-byte words: `mstopk/between-nodes` and "
        "`cost_model.paper_cost`",
    ),
)
