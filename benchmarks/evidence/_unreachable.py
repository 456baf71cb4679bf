"""Claims that take a cluster, GPUs or data that cannot be had here, each with the reason."""

from ._claims import unchecked

OK_TOPK, SPARCML, ADTOPK, MSTOPK = "Ok-Topk", "SparCML", "ADTopk", "MSTopK"
CLUSTER = "it takes 32 or more GPUs of a cluster"
IMAGENET = "ImageNet and GPUs"
GPU = "it takes a GPU; this command runs on a CPU, and nothing here was timed on a GPU"

CLAIMS = (
    unchecked(
        "ok-topk/vgg-time",
        "Training VGG-16 it is 1.51 to 8.83 times as fast as the others.",
        f"{OK_TOPK}, section 5.4.1, Figure 8",
        "1.51 to 8.83",
        CLUSTER,
    ),
    unchecked(
        "ok-topk/an4",
        "An LSTM on AN4 ends with a word error rate of 0.309 (dense 0.308), 1.34 to 7.71 times "
        "as fast.",
        f"{OK_TOPK}, section 5.4.2, Figures 10 and 11",
        "0.309; 1.34 to 7.71",
        "the speech corpus AN4 and 32 GPUs",
    ),
    unchecked(
        "ok-topk/bert-time",
        "BERT is trained in 47 hours in place of 150.",
        f"{OK_TOPK}, section 5.4.3, Figure 13",
        "3.19",
        "400,000 iterations of BERT on 32 GPUs",
    ),
    unchecked(
        "ok-topk/weak-scaling",
        "From 32 to 256 GPUs Ok-Topk keeps 76.3 % of its efficiency.",
        f"{OK_TOPK}, section 5.4.3, Figure 12",
        "0.763",
        "what is lost is selection and waiting, which no formula has: by those of the exchange it "
        "would keep 99.8 %",
    ),
    unchecked(
        "ok-topk/balanced-gather",
        "Balancing first makes the allgather 1.12 to 1.43 times as fast where it is triggered.",
        f"{OK_TOPK}, section 5.3, Figure 7b",
        "1.12 to 1.43",
        "an allgather of parts of different lengths between 16 to 64 hosts: here all parts have "
        "slots of one length, and how long they would be is in the figure above",
    ),
    unchecked(
        "ok-topk/rotation",
        "Rotated destinations and bucketing avoid congestion at the owners.",
        f"{OK_TOPK}, section 3.1.1",
        "no number",
        "endpoint congestion takes a real network with many hosts",
    ),
    unchecked(
        "ok-topk/selection-time",
        "On a GPU the reused threshold takes next to no time beside an exact top-k.",
        f"{OK_TOPK}, section 5.4",
        "no number",
        GPU,
    ),
    unchecked(
        "sparcml/spark",
        "Linear models converge 63 times as fast as with Apache Spark.",
        f"{SPARCML}, section 8.2",
        "63",
        "another system, on 8 nodes of a supercomputer",
    ),
    unchecked(
        "sparcml/url-time",
        "An epoch of logistic regression on URL is 3.52 times as fast on 32 nodes of Piz Daint.",
        f"{SPARCML}, section 8.2, Table 2",
        "3.52",
        "32 nodes of a fast network; for Gigabit Ethernet see `sparcml/url-ethernet`",
    ),
    unchecked(
        "sparcml/imagenet",
        "A wide ResNet on ImageNet is trained twice as fast on 64 GPUs.",
        f"{SPARCML}, section 8.4",
        "2 and 1.85",
        f"it takes {IMAGENET}",
    ),
    unchecked(
        "sparcml/speech",
        "A speech model is trained in 1.78 days in place of 14.",
        f"{SPARCML}, section 8.4",
        "7.9",
        "the data are proprietary",
    ),
    unchecked(
        "sparcml/translation",
        "Translation of Hansards is 1.5 times as fast, within 1 % of the BLEU score.",
        f"{SPARCML}, section 8.3",
        "1.5",
        "the corpus and a cluster of GPUs",
    ),
    unchecked(
        "adtopk/throughput",
        "ADTopk raises the throughput by 12 to 293 %.",
        f"{ADTOPK}, experiment 2, Figure 10",
        "1.12 to 3.93",
        "it takes 8 to 64 GPUs",
    ),
    unchecked(
        "adtopk/utilisation",
        "Sorting a whole layer uses 13 to 35 % of a GPU.",
        f"{ADTOPK}, section 3.2, Figure 4",
        "13 to 35 %",
        "it takes a GPU and its counters",
    ),
    unchecked(
        "adtopk/final-accuracy",
        "ADTopk ends nearest to dense of seven methods on CIFAR-100, WikiText-2 and SQuAD.",
        f"{ADTOPK}, experiment 1, Figure 9",
        "71.41 % (dense 71.73 %)",
        "the data sets and weeks of a GPU",
    ),
    unchecked(
        "adtopk/speed",
        "On a GPU sorting by row takes 27 to 51 % less time than top-k of a layer.",
        f"{ADTOPK}, experiment 4, Figure 12",
        "0.49 to 0.73",
        f"{GPU}; for a CPU see `library/selector-speed`",
    ),
    unchecked(
        "mstopk/speed",
        "On a GPU MSTopK is much faster than an exact top-k, and faster than DGC.",
        f"{MSTOPK}, section 5.2, Figure 6",
        "negligible beside both",
        f"{GPU}; for a CPU see `library/selector-speed`",
    ),
    unchecked(
        "mstopk/throughput",
        "ResNet-50 and a Transformer are trained up to 25 to 40 % faster on 128 V100.",
        f"{MSTOPK}, section 5.5.2, Table 3",
        "1.25 to 1.40",
        "it takes 128 GPUs",
    ),
    unchecked(
        "mstopk/dawnbench",
        "ImageNet to 93 % (top 5) takes 151 seconds on 128 V100.",
        f"{MSTOPK}, section 5.6, Table 5",
        "151 s",
        f"it takes {IMAGENET}: 128 of them",
    ),
)
