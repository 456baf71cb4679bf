"""Larger programs of other people, as docs/gallery.md changes them, and what it says."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx

import optax_ext
from benchmarks._common.processes import ROOT
from benchmarks.learning import _page_programs, programs
from benchmarks.learning._page_programs import held, names_after
from tests.clients import WORKERS, sends_little, shows_the_lines_that_it_counts
from tests.optax_ext.helpers import bits, mesh

pytestmark = pytest.mark.usefixtures("default_promotion")
PROGRAMS = _page_programs.programs_of("gallery")
# What counts as trained, and how much worse than before a program may be afterwards.
BOUNDS = {
    "An image classifier": (0.7, 0.1),
    "A language model": (2.3, 0.1),
    "A recurrent model": (2.2, 0.1),
    "LoRA": (0.9, 0.15),
    "A graph network": (0.2, 0.05),
    "PPO": (-250, 100),
    "Variational inference": (22, 0.5),
}
QUICK = ("Variational inference",)


def beginning(section, end):
    """The lines of a changed program before the one that begins so."""
    lines = PROGRAMS[section].after
    return lines[: next(i for i, line in enumerate(lines) if line.startswith(end))]


def loss_of(names):
    """A loss on held-out examples; for PPO minus the steps of an episode."""
    return -float(names["steps_of_an_episode"]) if "ended" in names else float(names["held_out"])


def test_the_page_shows_the_lines_that_it_counts():
    # A whole step becomes one call.
    shows_the_lines_that_it_counts("gallery", 7, {"a language model": 8})


def test_the_page_says_what_the_programs_gave():
    rows = json.loads((ROOT / "docs/data/gallery.json").read_text())["rows"]
    first = {(row["program"], row["exchange"]): row["value"][0] for row in rows}
    found = re.findall(
        r"\n## ([^\n]*)\n(?:(?!\n## ).)*?was ([\d.]+) with seed 0, and ([\d.]+) before",
        _page_programs.text_of("gallery"),
        re.DOTALL,
    )
    assert [name for name, *_ in found] == [
        "An image classifier",
        "A language model",
        "LoRA",
        "PPO",
    ]
    for name, *said in found:
        for text, exchange in zip(said, ("after", "before"), strict=True):
            digits = len(text.partition(".")[2])
            assert text == f"{first[name, exchange]:.{digits}f}"


@pytest.mark.parametrize(
    "section", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in BOUNDS]
)
def test_a_program_trains_as_before(section):
    before, after = map(names_after, PROGRAMS[section])
    most, worse = BOUNDS[section]
    assert loss_of(before) < most
    assert loss_of(after) < loss_of(before) + worse
    sends_little(after)
    if section == "PPO":
        # Each worker has made the parameters itself.
        for leaf in jax.tree.leaves(after["state"].params):
            np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * WORKERS))


@pytest.mark.slow
def test_the_checkpoint_of_the_classifier_holds_every_residual():
    """The training goes on from it with the same bits, and from one worker's state it does not."""
    names = names_after(PROGRAMS["An image classifier"].after)
    rngs = jax_utils.replicate(jax.random.key(1))
    fresh = jax.pmap(names["create_train_state"], "batch")(rngs)
    restored = names["restore_checkpoint"](fresh)
    rows = np.asarray(optax_ext.get_state(restored).residual).reshape(WORKERS, -1)
    assert len({row.tobytes() for row in rows}) == WORKERS
    assert bits(restored) == bits(names["state"])
    (batch,) = names["batches"](1, of=1500)
    batch = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
    lost = jax_utils.replicate(jax_utils.unreplicate(jax.device_get(names["state"])))
    on, off, other = (
        bits(names["train_step"](state, batch)) for state in (names["state"], restored, lost)
    )
    assert on == off
    assert on != other


@pytest.mark.slow
def test_lora_exchanges_the_adapters_alone():
    """The other parameters keep the bits that they have after the pretraining."""
    names = names_after(PROGRAMS["LoRA"].after)
    model = names["model"]
    adapters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    assert optax_ext.get_state(held(names)).residual.shape == (WORKERS, adapters)
    pretrained = names_after(beginning("LoRA", "tx = "))["model"]
    kept, start = (nnx.state(x, (nnx.Param)) for x in (model, pretrained))
    frozen = [
        (a, b)
        for (path, a), b in zip(
            jax.tree.leaves_with_path(kept), jax.tree.leaves(start), strict=True
        )
        if "base_module" in jax.tree_util.keystr(path)
    ]
    assert len(frozen) == 6
    for a, b in frozen:
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_graph_network_may_have_other_numbers_of_graphs_on_each_worker():
    """With the mean count of the page, a step of workers is the step of the whole batch."""
    lines = [x.replace("Dropout(0.1", "Dropout(0.0") for x in beginning("A graph network", "key, ")]
    text = "\n".join(lines)
    mean = '/ jax.lax.pmean(jnp.sum(graphs.mask), "data")'
    assert mean.removeprefix("/ ") in _page_programs.text_of("gallery")
    assert text.count("/ jnp.sum(graphs.mask)") == 1
    names = names_after(text.replace("/ jnp.sum(graphs.mask)", mean).splitlines())
    whole = names_after(lines)
    random = np.random.default_rng(1)
    packs = [names["pack"]([names["random_graph"](random) for _ in range(8)]) for _ in range(8)]
    # Worker i has i graphs of 8 that count, and the first one has padding only.
    packs = [pack._replace(mask=np.arange(9) < i) for i, pack in enumerate(packs)]
    params = names["GraphNet"]().init(jax.random.key(0), packs[0])["params"]
    apply = names["GraphNet"]().apply

    def reference(params):
        losses = [
            jnp.sum(pack.mask) * whole["masked_mean"](apply({"params": params}, pack), pack)
            for pack in packs[1:]
        ]
        return sum(losses) / sum(pack.mask.sum() for pack in packs)

    tx = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1.0))
    state = names["train_state"].TrainState.create(
        apply_fn=apply, params=params, tx=optax_ext.with_mesh(tx, mesh(WORKERS))
    )
    graphs = jax.tree.map(lambda *x: np.concatenate(x), *packs)
    new, loss = names["train_step"](state, graphs, {"dropout": jax.random.key(0)})
    expected, gradients = jax.value_and_grad(reference)(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    moved = jax.tree.map(jnp.subtract, params, new.params)
    for a, b in zip(*map(jax.tree.leaves, (moved, gradients)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("section", PROGRAMS)
def test_the_benchmark_changes_only_the_optimizer(section):
    """The other exchanges come before the original optimizer, and before its clipping."""
    arms = programs.arms_of(PROGRAMS[section], [0.2])
    after = arms["after"]
    original = {
        "An image classifier": "optax.sgd(0.05, momentum=0.9, nesterov=True)",
        "A language model": "optax.adamw(3e-3)",
        "A recurrent model": "optax.adam(rate)",
        "LoRA": "optax.adamw(3e-3)",
        "A graph network": "optax.adam(3e-3)",
        "PPO": "optax.adam(2.5e-3, eps=1e-5)",
        "Variational inference": "optax.adam(3e-3)",
    }[section]
    for name in programs.EXCHANGES:
        imported, *lines = arms[name]
        assert imported == "import optax_ext"
        changed = [line for line, old in zip(lines, after, strict=True) if line != old]
        text = "\n".join(changed)
        call = f"optax_ext.{name.partition('(')[0]}("
        assert 0 <= text.index(call) < text.index(original)
        assert section != "PPO" or text.index(call) < text.index("clip") < text.index("adam(")
        assert ("sparse_adamw(" in text, "ok_topk_sgd(" in text) == (False, False)
    (denser,) = [a for a, b in zip(arms["density=0.2"], after, strict=True) if a != b]
    assert denser.count("density=0.2") == 1
    assert denser.count("density=") == 1
    for arm in arms.values():
        (faster,) = [a for a, b in zip(_page_programs.scaled(arm, 3), arm, strict=True) if a != b]
        assert faster.count("(3 * ") == 1
