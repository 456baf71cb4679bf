"""What the papers say of accuracy, thresholds and convergence, on small networks."""

from collections.abc import Callable

import jax
import numpy as np

from ._claims import Bound, Claim, Elsewhere
from ._runs import DENSITY, WORKERS, digits, on_digits, on_regression, on_text, xi

OK_TOPK, SPARCML = "Ok-Topk", "SparCML"
DIGITS = "a convolutional network on digits, P = 8, density 1 %, 400 steps"
XI_TEXT = (
    "{} on characters, P = 8, density 1 %, 400 steps, `ok_topk` at every step, SGD at a constant "
    "rate"
)
TEXT = "a transformer on characters, P = 4, 400 steps"


def worse(sparse: str) -> Callable[[int, bool], dict[str, float]]:
    """A check: by how many percent the loss is above that of the dense AdamW."""

    def check(seed: int, quick: bool) -> dict[str, float]:
        one, other = (on_text(name, seed, quick).values[-1] for name in (sparse, "dense"))
        return {"% above dense": 100 * (one / other - 1), "loss": one}

    return check


def _deviation(
    which: int, name: str, variant: str = "paper"
) -> Callable[[int, bool], dict[str, float]]:
    """A check: how far a count of Ok-Topk as published is from k, after the first tenth."""

    def check(seed: int, quick: bool) -> dict[str, float]:
        shares = counts(variant, seed, quick)[which]
        late = shares[max(1, len(shares) // 10) :]
        return {
            f"deviation of the {name} count": float(np.abs(late - 1).mean()),
            "mean count, k": float(late.mean()),
        }

    return check


def _gaussian(seed: int, quick: bool) -> dict[str, float]:
    shares = counts("gaussian", seed, quick)[0]
    steps = len(shares)
    return {
        "first tenth, k": float(shares[: max(1, steps // 10)].mean()),
        "last quarter, k": float(shares[steps - max(1, steps // 4) :].mean()),
    }


def counts(name: str, seed: int, quick: bool) -> np.ndarray:
    """What a worker selects and what is delivered at each step, / k."""
    curve = on_digits(name, seed, quick)
    assert curve.counts is not None
    size = sum(leaf.size for leaf in jax.tree.leaves(digits().init(0)))
    return curve.counts / round(DENSITY * size)


def _xi_below(model: str) -> Callable[[int, bool], dict[str, float]]:
    """A check: the xi of a training with a rate that stays."""

    def check(seed: int, quick: bool) -> dict[str, float]:
        found = xi(0.01, seed, quick, model)
        return {
            "mean xi": float(found.mean()),
            "mean xi, first half": float(found[: len(found) // 2].mean()),
            "largest xi": float(found.max()),
        }

    return check


def _xi_falls(seed: int, quick: bool) -> dict[str, float]:
    stays, falls = (xi(0.01, seed, quick, "lstm", falls) for falls in (False, True))
    last = len(stays) * 9 // 10
    return {"falling / constant rate, last tenth": float(falls[last:].mean() / stays[last:].mean())}


def _xi_density(seed: int, quick: bool) -> dict[str, float]:
    one, two = (xi(density, seed, quick, "lstm") for density in (0.01, 0.02))
    return {"xi at 2 % / at 1 %": float(two.mean() / one.mean())}


def _two_bits(seed: int, quick: bool) -> dict[str, float]:
    coarse, exact = (on_regression(bits, seed, quick).values for bits in (2, None))
    return {
        "loss / that of exact values": coarse[-1] / exact[-1],
        "loss / that before": coarse[-1] / coarse[0],
    }


CLAIMS = (
    Claim(
        "ok-topk/language-model",
        "With Ok-Topk in front of Adam BERT's loss is 2.43, and 2.33 dense: 4.3 % more.",
        f"{OK_TOPK}, section 5.4.3, Figure 13",
        "4.3 %",
        f"{TEXT}, `ok_topk` at 1 % in front of AdamW: in so few steps an entry is delivered four "
        "times, and the gap shrinks in longer trainings (docs/convergence.md; at most 2,000 steps "
        "here, 400,000 in the paper)",
        (Bound("% above dense", most=4.3),),
        worse("ok_topk"),
        chance=True,
    ),
    Claim(
        "ok-topk/global-count",
        "With thresholds reused for 32 steps as they are (section 3.1.3) the global count is "
        "within 11 % of k.",
        f"{OK_TOPK}, section 5.2, Figure 6",
        "below 0.11",
        f"{DIGITS}, `ok_topk_sgd(paper=True)`; after the first tenth",
        (Bound("deviation of the global count", most=0.11),),
        _deviation(1, "global"),
    ),
    Claim(
        "ok-topk/local-count",
        "So is the local count, with thresholds reused for 32 steps as they are.",
        f"{OK_TOPK}, section 5.2, Figure 6",
        "below 0.11",
        f"{DIGITS}, `ok_topk_sgd(paper=True)`; after the first tenth",
        (Bound("deviation of the local count", most=0.11),),
        _deviation(0, "local"),
    ),
    Claim(
        "ok-topk/global-count-corrected",
        "With thresholds that their counts correct at every step, as in the program that the "
        "paper links to, the global count is within 11 % of k.",
        f"{OK_TOPK}, section 5.2, Figure 6",
        "below 0.11",
        f'{DIGITS}, `ok_topk_sgd(paper="corrected")`; after the first tenth',
        (Bound("deviation of the global count", most=0.11),),
        _deviation(1, "global", "paper, corrected"),
    ),
    Claim(
        "ok-topk/local-count-corrected",
        "So is the local count, with thresholds that their counts correct.",
        f"{OK_TOPK}, section 5.2, Figure 6",
        "below 0.11",
        f'{DIGITS}, `ok_topk_sgd(paper="corrected")`; after the first tenth',
        (Bound("deviation of the local count", most=0.11),),
        _deviation(0, "local", "paper, corrected"),
    ),
    Claim(
        "ok-topk/gaussian-count",
        "Gaussiank selects too many at first, later an order of magnitude too few.",
        f"{OK_TOPK}, section 5.2, Figure 6",
        "above 1, then 0.1",
        f"{DIGITS}, its own selection drives the training",
        (Bound("first tenth, k", least=1), Bound("last quarter, k", most=0.1)),
        _gaussian,
    ),
    Claim(
        "ok-topk/xi",
        "xi stays below P, so that training converges: VGG-16.",
        f"{OK_TOPK}, section 4, Figure 5a",
        "below P",
        f"{DIGITS}, `ok_topk` at every step, a constant rate; as the digits are learned by heart "
        "the gradient, by which xi is divided, vanishes",
        (Bound("mean xi", most=WORKERS),),
        _xi_below("digits"),
    ),
    Claim(
        "ok-topk/xi-lstm",
        "xi stays below P: an LSTM.",
        f"{OK_TOPK}, section 4, Figure 5b",
        "below P",
        XI_TEXT.format("an LSTM"),
        (Bound("mean xi", most=WORKERS),),
        _xi_below("lstm"),
    ),
    Claim(
        "ok-topk/xi-transformer",
        "xi stays below P: BERT.",
        f"{OK_TOPK}, section 4, Figure 5c",
        "below P",
        XI_TEXT.format("a transformer"),
        (Bound("mean xi", most=WORKERS),),
        _xi_below("transformer"),
    ),
    Claim(
        "library/xi-rate",
        "With a rate that falls xi grows: what waits was made at a larger one.",
        "This library, this page",
        "above 2",
        XI_TEXT.replace("a constant rate", "a rate that falls to 1 %").format("an LSTM"),
        (Bound("falling / constant rate, last tenth", least=2),),
        _xi_falls,
    ),
    Claim(
        "ok-topk/xi-density",
        "A higher density makes xi smaller.",
        f"{OK_TOPK}, section 4, Figure 5",
        "below 1",
        f"{XI_TEXT.format('an LSTM')}, and 2 %",
        (Bound("xi at 2 % / at 1 %", most=1),),
        _xi_density,
        chance=True,
        seeds=6,
    ),
    Claim(
        "sparcml/two-bits",
        "Quantised top-k SGD converges for any unbiased rounding, as 2 bits.",
        f"{SPARCML}, Theorem 4.1 and Algorithm 1",
        "converges",
        "linear regression, n = 1,024, density 5 %, P = 4, 600 steps, `quantized_topk(bits=2)`",
        (Bound("loss / that of exact values", most=2),),
        _two_bits,
        elsewhere=Elsewhere(
            "more slowly than with exact values", (Bound("loss / that before", most=0.5),)
        ),
    ),
    Claim(
        "library/sparse-adamw-text",
        "In the same steps `sparse_adamw` ends 0.7 % above the loss of AdamW with 4 workers.",
        "This library, README",
        "0.7 %, at worst 1.2 %, after 2,000 steps",
        TEXT,
        (Bound("% above dense", most=0.7),),
        worse("sparse_adamw"),
        chance=True,
    ),
)
