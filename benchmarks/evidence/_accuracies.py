"""What the papers say of the accuracy at the end of a training, where it can be told."""

from collections.abc import Callable

from ._claims import Bound, Claim
from ._noisy import accuracy

OK_TOPK, SPARCML, ADTOPK = "Ok-Topk", "SparCML", "ADTopk"
SEEDS = 6
# Of what is to end alike, in points: what SparCML, section 8.3, calls within 1 %.
ALIKE = 1.0
DIGITS = (
    "a convolutional network on digits with new noise at every sight, P = 8, density 1 %, 400 "
    "steps, the same rate for all; each seed holds out 450 others of the 1,797 images, eight times "
    "each"
)


def above(sparse: str, other: str = "dense") -> Callable[[int, bool], dict[str, float]]:
    """A check: accuracies, and how many points the first is above the second."""

    def check(seed: int, quick: bool) -> dict[str, float]:
        one, two = (accuracy(name, seed, quick) for name in (sparse, other))
        return {"points above": one - two, f"{sparse}, %": one}

    return check


def _claim(
    id: str,
    text: str,
    source: str,
    paper: str,
    least: float,
    check: Callable[[int, bool], dict[str, float]],
    *,
    most: float = float("inf"),
    setting: str = DIGITS,
) -> Claim:
    rule = (Bound("points above", least, most),)
    return Claim(id, text, source, paper, setting, rule, check, chance=True, seeds=SEEDS)


CLAIMS = (
    _claim(
        "ok-topk/accuracy",
        "Ok-Topk SGD reaches the accuracy of dense SGD.",
        f"{OK_TOPK}, section 5.4.1, Figure 9",
        "very close",
        -ALIKE,
        above("ok_topk_sgd"),
    ),
    _claim(
        "sparcml/four-bits",
        "With 8 of each 512 entries in 4 bits the accuracy ends 1 % above that of 32 bits.",
        f"{SPARCML}, section 8.3, Figure 4a",
        "1 point above",
        1.0,
        above("4 bits"),
        setting=DIGITS.replace("density 1 %", "8 of all 512"),
    ),
    _claim(
        "sparcml/four-bits-16",
        "With 16 of each 512 it matches it.",
        f"{SPARCML}, section 8.3, Figure 4a",
        "the same",
        -ALIKE,
        above("4 bits, 16 of 512"),
        most=ALIKE,
        setting=DIGITS.replace("density 1 %", "16 of all 512"),
    ),
    _claim(
        "adtopk/accuracy",
        "ADTopk ends 1.5 to 5.2 points above top-k.",
        f"{ADTOPK}, experiment 3, Figure 11a",
        "1.51 to 5.24 points above",
        1.51,
        above("adtopk", "top-k"),
        setting=f"{DIGITS}; both with error feedback",
    ),
    _claim(
        "adtopk/no-feedback",
        "Without error feedback, too, and by far.",
        f"{ADTOPK}, experiment 5, Figure 13a",
        "67.42 and 57.14 %: 10.28 points above",
        10.28,
        above("adtopk, no feedback", "top-k, no feedback"),
        setting=f"{DIGITS}; both without error feedback",
    ),
    _claim(
        "adtopk/interleaved",
        "ADTopk-i, which takes turns with top-k, ends 1.5 to 2.9 points above ADTopk.",
        f"{ADTOPK}, experiment 3, Figure 11a",
        "1.5 to 2.89 points above",
        1.5,
        above("adtopk-i", "adtopk"),
    ),
    _claim(
        "adtopk/threshold",
        "ADTopk-t, with reused thresholds, ends as ADTopk-i.",
        f"{ADTOPK}, experiment 3, Figure 11a",
        "almost the same",
        -ALIKE,
        above("adtopk-t", "adtopk-i"),
        most=ALIKE,
    ),
    _claim(
        "mstopk/accuracy",
        "Training with MSTopK ends slightly below dense.",
        "MSTopK, section 5.5.1, Table 2",
        "0.19 and 0.25 points below; BLEU 24.16 of 26.74",
        -ALIKE,
        above("mstopk"),
        setting=f"{DIGITS}; no translation, where the paper loses most",
    ),
    _claim(
        "library/sparse-adamw-digits",
        "`sparse_adamw` ends near the accuracy of the dense AdamW.",
        "This library, learning.md",
        "0.13 points below, at worst 0.35, on Fashion-MNIST with 4 workers",
        -ALIKE,
        above("sparse_adamw", "adamw"),
        setting=DIGITS.replace("density 1 %", "defaults"),
    ),
)
