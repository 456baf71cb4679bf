"""README and manual: their programs run, and their tables come from stored results."""

import functools
import inspect
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from benchmarks._common.processes import ROOT, environment
from optax_ext._optimizers._rates import default_gain
from optax_ext._state import _find
from sparse_collectives import cost_model
from sparse_collectives.__main__ import main as plan
from sparse_collectives.transport import _direct
from tests.optax_ext.helpers import DOCS, mesh, programs_of
from tests.programs import direct_messages
from tools.prose.__main__ import without_code
from tools.tables._data import table_of

pytestmark = pytest.mark.usefixtures("default_promotion")


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


RECOMMENDATIONS = table_of("choosing.md", "recommendations")
IN_README = "| you have | begin with |"


def recommended(table):
    """The expressions in a table of recommendations."""
    return set(re.findall(r"`((?:optax\.chain|sparse_\w+|ok_topk_sgd)\(.*?\))`", table))


# Programs.


def names_for_a_program(batches, params):
    rng = np.random.default_rng(0)
    return {
        "params": {name: jnp.ones(shape) for name, shape in params.items()},
        "loss_fn": lambda p, batch: jnp.mean((batch @ p["w"] + p.get("b", 0)) ** 2),
        "batches": [rng.standard_normal((16, 10)).astype(np.float32) for _ in range(batches)],
    }


def test_the_program_of_the_index_runs():
    (program,) = programs_of("index")
    names = names_for_a_program(3, {"w": (10, 7)})
    exec(program, names)
    assert int(optax_ext.get_state(names["opt_state"]).count) == 3
    assert isinstance(names["info"], optax_ext.StepInfo)


def test_the_program_of_the_readme_runs_as_it_is_pasted(tmp_path):
    (program,) = programs_of("../README")
    assert len([line for line in program.splitlines() if line]) <= 16
    (line,) = lines_of(program, tmp_path)
    loss, words = map(float, re.findall(r"[\d.]+", line))
    # 10 at first, and 1/50 of the words of a dense allreduce of 640 numbers.
    assert loss < 1
    assert 0 < words < 2 * 640 * 7 / 8


def rows_of_the_readme():
    table = text_of("README.md").partition(IN_README)[2].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        (expression, *_) = recommended(line)
        marks = [] if "every=" in expression else [pytest.mark.slow]
        yield pytest.param(expression, marks=marks, id=expression)


@pytest.mark.parametrize("expression", [*rows_of_the_readme()])
def test_each_row_of_the_readme_runs_in_its_program(expression, tmp_path):
    (program,) = programs_of("../README")
    given = """
import functools, optax
for name in ("sparse_adamw", "ok_topk_sgd", "quantized"):
    globals()[name] = functools.partial(getattr(optax_ext, name), axis="data")
rate, m, optimizer = 1e-2, 0.9, optax.adamw(1e-2)
"""
    program = re.sub(r"(?m)^tx = .*$", f"{given}tx = {expression}", program)
    (line,) = lines_of(program, tmp_path)
    loss, words = map(float, re.findall(r"[\d.]+", line))
    # 10 at first; the last of 200 steps is between two exchanges of 30.
    assert loss < 2
    assert (words == 0) == ("every=" in expression)


def test_a_sentence_stands_on_one_page():
    """A fact that is written twice is soon two facts: a page links to another one instead."""
    seen = {}
    for page in sorted(DOCS.rglob("*.md")):
        text = without_code(page.read_text(encoding="utf-8"))
        for block in re.split(r"\n\s*\n|\n\s*[-*|]|\n#+ ", text):
            words = re.findall(r"[\w`.%-]+", block.lower())
            for run in zip(*(words[i:] for i in range(10)), strict=False):
                assert seen.setdefault(run, page) == page, f"{' '.join(run)!r} is also on {page}"


def test_the_programs_of_the_way_from_optax_run():
    names, losses = {}, []
    for program in programs_of("training")[:3]:
        exec(program, names)
        losses.append(float(names["loss"]))
    # A plain optimizer, and a sparse one; the last has no loss of its own.
    before, after, _ = losses
    assert before < 0.9
    assert after < 0.9
    assert int(optax_ext.get_state(names["opt_state"]).count) == 1


@pytest.mark.slow
def test_the_programs_between_sites_run(capsys, tmp_path):
    waiting, direct, beside, stored = programs_of("between_sites")
    with direct_messages(False):
        exec(direct, {})
        assert _direct._in_use
    names = {}
    exec(waiting, names)
    assert names["losses"].shape == ()
    assert float(capsys.readouterr().out) == pytest.approx(float(names["losses"].mean()), rel=1e-5)
    losses = [float(x) for x in re.findall(r"[\d.]+", " ".join(lines_of(beside, tmp_path)))]
    assert len(losses) == 10
    assert max(losses) < 0.5  # 1 at first
    exec(stored, names)
    assert capsys.readouterr().out == "3 ('berlin',)\n"
    assert float(names["loss"]) < 0.5


@pytest.mark.slow
def test_the_programs_about_training_run(capsys):
    programs = programs_of("training")[3:]
    assert len(programs) == 3
    names = names_for_a_program(4, {"w": (10, 7), "b": (7,)})
    for program in programs:
        exec(program, names)
    # Every second step, by the monitor.
    assert capsys.readouterr().out.count("sparse/residual_norm") == 2
    states = _find.get_states(names["opt_state"])
    # The bucket of the bias is all dense, and the bucket of the matrix all sparse.
    assert [(s.layout.size, s.layout.dense_size) for s in states] == [(70, 0), (0, 7)]
    assert [int(s.count) for s in states] == [4, 4]


@pytest.mark.slow
def test_the_program_of_the_planner_times_dense_and_sparse_steps(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    lines = lines_of("\n".join(programs_of("planner")), tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["dense", "float16", "sparse_adamw"]
    quartiles = [[*map(float, re.findall(r"[\d.]*\d", line.partition(":")[2]))] for line in lines]
    assert all(low <= middle <= high for times in quartiles for low, middle, high in [times[:3]])
    assert quartiles[0][3:] == [1.0] * 3


def lines_of(program, folder):
    """Its output in a Python process of its own, in which warnings are errors."""
    command, given = [sys.executable, "-W", "error", "-c", program], {"env": environment()}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_quick_start_prints_what_the_page_says(tmp_path):
    said = re.findall(r"^(?:loss \d|dense:|sparse_adamw:).*$", text_of("docs/quick-start.md"), re.M)
    assert len(said) == 4
    number = r"\d[\d,]*(?:\.\d+)?"
    found = lines_of("\n".join(programs_of("quick-start")), tmp_path)
    for line, expected in zip(found, said):
        assert re.sub(number, "N", line) == re.sub(number, "N", expected)
        pairs = (re.findall(number, x.replace(",", "")) for x in (line, expected))
        # Another version of jax or of its compiler rounds differently.
        now, then = (list(map(float, each)) for each in pairs)
        assert now == pytest.approx(then, rel=0.15), line
        # The shapes of messages do not depend on them.
        words = r"[\d,]+(?= words)"
        assert re.findall(words, line) == re.findall(words, expected)


@pytest.mark.slow
def test_the_program_of_the_figures_draws_them(tmp_path):
    program = f"import runpy, pathlib; names = runpy.run_path({str(DOCS / 'figures/idea.py')!r})"
    lines_of(f"{program}; names['main'](pathlib.Path('.'))", tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert set() < drawn <= {path.name for path in (DOCS / "images").iterdir()}


@pytest.mark.parametrize("page", ["README.md", "docs/planner.md"])
def test_the_planner_prints_what_is_said_of_it(page, capsys):
    text = text_of(page)
    command = r"python -m sparse_collectives (plan [^`\n\\]*(?:\\\n[^`\n\\]*)*)"
    found = re.search(rf"`{command}`|```\n\$ {command}\n(.*?)```", text, re.DOTALL)
    assert plan(shlex.split((found[1] or found[2]).replace("\\\n", " "))) == 0
    printed = capsys.readouterr().out
    if page == "README.md":
        assert "Optimizer: sparse_adamw" in printed
        assert "Use partitioned_topk(few)" in printed
    else:
        # Three points stand for rows of a table.
        shown = re.escape(found[3].rstrip()).replace(re.escape("...\n"), r"(?:\S.*\n)+")
        assert re.fullmatch(shown, printed.rstrip())


# Expressions in tables: the recommendations, and the systems of the papers.

SYSTEMS = ["mstopk", "dgc", "gaussian_k", "redsync", "sidco", "adtopk"]
SYSTEMS += ["adtopk_interleaved", "adtopk_threshold"]


def test_the_readme_recommends_nothing_else():
    table = text_of("README.md").partition(IN_README)[2].split("\n\n")[0]
    assert set() < recommended(table) < recommended(RECOMMENDATIONS)


def expressions():
    """The expressions of complete optimizers and chains, and of the systems' selectors."""
    found = recommended(RECOMMENDATIONS)
    pattern = r"^\| [^|]+ \| `(optax_ext\.topk_a\(.*sc\.select\.published\.(\w+)\(.*)` \|$"
    systems = re.findall(pattern, text_of("docs/selectors.md"), re.MULTILINE)
    assert [name for _, name in systems] == SYSTEMS
    yield from sorted(found)
    for expression, name in systems:
        marks = [pytest.mark.slow] if name.startswith("adtopk_") else []
        yield pytest.param(expression, marks=marks, id=name)


@pytest.mark.parametrize("expression", list(expressions()))
@pytest.mark.one_in(2)
def test_an_expression_of_a_table_can_be_trained_with(expression):
    ours = ("sparse_adamw", "sparse_optimizer", "ok_topk_sgd", "ok_topk", "topk_a")
    ours += ("quantized", "powersgd", "dense")
    names = {name: functools.partial(getattr(optax_ext, name), axis="data") for name in ours}
    names |= {name: getattr(optax_ext, name) for name in ("momentum_correction", "small_leaves")}
    # `rate` is the learning rate of the dense run, `m` its momentum, `r` a rank, `s` some steps.
    names |= {"rate": 1e-2, "m": 0.9, "r": 2, "s": 4, "density": 0.25}
    names |= {"optimizer": optax.lion(1e-3), "unit": optax.contrib.muon(1.0)}
    names["scaling"] = optax.scale_by_factored_rms()
    tx = eval(expression, names | {"optax": optax, "optax_ext": optax_ext, "sc": sc})
    params = {"w": jnp.ones((40, 30))}
    state = optax_ext.abstract_state(tx, params, mesh(8))
    step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh(8))
    step.trace(params, state, jnp.ones((8, 40)))


def test_what_sparse_adamw_takes_of_adamw():
    """The table of arguments in docs/training.md."""
    ours = inspect.signature(optax_ext.sparse_adamw).parameters
    theirs = inspect.signature(optax.adamw).parameters
    for name in ("b2", "eps", "weight_decay", "mask"):
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[name].default == theirs[name].default
    assert list(ours)[:2] == ["learning_rate", "density"]
    for name in ("b1", "nesterov", "mu_dtype", "eps_root"):
        assert name in theirs
        with pytest.raises((TypeError, ValueError)):
            optax_ext.sparse_adamw(1e-3, axis="data", **{name: 0.5})


def test_the_gain_is_the_root_of_half_the_workers_within_1_and_2():
    assert [default_gain(p) for p in (1, 2, 8, 64)] == [1, 1, 2, 2]
    assert default_gain(4) == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("algorithm", "size", "selected", "workers", "bound", "expected"),
    [
        # Fixed costs at tiny k, of docs/troubleshooting.md.
        ("ok_topk", 10**6, 8, 8, "lower", "189"),
        ("ok_topk", 10**6, 100, 8, "lower", "812"),
        ("ok_topk", 10**6, 1000, 8, "lower", "4921"),
        # The exchange of `sparse_adamw`, of docs/training.md: 3.5 and 4.3 k (P-1)/P at 1 % of n.
        ("partitioned_topk(few)", 14_700_000, 735_000, 8, "expected", "3.5 k"),
        ("partitioned_topk(few)", 14_700_000, 735_000, 34, "expected", "4.3 k"),
        ("partitioned_topk(few)", 31_745, 1_587, 34, "expected", "4.8 k"),
    ],
)
def test_words_that_pages_name(algorithm, size, selected, workers, bound, expected):
    load = cost_model.Workload(size, selected, workers)
    words = getattr(cost_model.predict(algorithm, load), bound).words
    number, _, unit = expected.partition(" ")
    if unit:
        words /= 0.01 * size * (workers - 1) / workers
    digits = len(number.partition(".")[2])
    assert f"{words:.{digits}f}" == number
