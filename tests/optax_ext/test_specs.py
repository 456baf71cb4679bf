"""The specs of parts, and the names of sparse_collectives that optax_ext uses.

A part has the same text in every program, and another one for other arguments. Of
sparse_collectives, optax_ext uses public names and the modules that both packages share.
"""

import ast
import inspect
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives import extend
from tests.optax_ext.helpers import normal, refused, run, same
from tests.sparse_collectives.helpers import selector_factory

TOPK_A = sc.allreduce.topk_a()


def own_selector(**arguments):
    """A selector as a user writes it, with a spec where there are arguments."""
    spec = sc.Spec.of("own_selector", **arguments) if arguments else None
    return sc.select.topk(density=0.1)._replace(spec=spec)


def transformation(selector, allreduce=TOPK_A, **options):
    return optax_ext.sparse_allreduce(selector, allreduce, axis="w", **options)


def state_of(*parts, **options):
    return optax_ext.init_state(transformation(*parts, **options), jnp.zeros(40), {"w": 2})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", (1, None)), ("a", (2, None))),
        ({"a": 1, "b": (2,)}, {"a": 1, "b": (3,)}),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.array([0, 1, 3])),
        (np.arange(3), np.arange(3.0)),
        ({"per_layer": jnp.ones(3)}, {"per_layer": jnp.zeros(3)}),
        (np.float32(0.1), np.float32(0.2)),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.float32, jnp.bfloat16),
        (np.dtype("int32"), np.int8),
        ((sc.select.topk(density=0.1),), (sc.select.topk(density=0.2),)),
        (sc.wire.raw(), sc.wire.bf16()),
        ("1", 1),
        (True, 1),
    ],
    # Functions are printed with their address, and two test processes must agree on a name.
    ids=lambda option: type(option).__name__,
)
def test_states_that_differ_in_an_option_are_told_apart(one, other):
    first, second, again = (state_of(own_selector(option=x)) for x in (one, other, one))
    assert jax.tree.structure(first) != jax.tree.structure(second)
    assert first.settings == again.settings
    assert "0x" not in first.settings.selector
    saved = optax_ext.checkpoint_metadata(first)
    optax_ext.check_metadata(saved, again)
    refused(r"selector: own_selector\(option=", optax_ext.check_metadata, saved, second)


def test_the_text_does_not_depend_on_the_order_of_arguments_or_on_the_content_of_a_tracer():
    assert sc.Spec.of("f", a={"x": 1, "y": 2}, b=3) == sc.Spec.of("f", b=3, a={"y": 2, "x": 1})
    assert str(sc.Spec.of("f", b=3, a=None)) == "f(a=None, b=3)"
    specs = []
    jax.eval_shape(lambda x: specs.append(str(sc.Spec.of("f", scale=x))), jnp.zeros((2, 3)))
    assert specs == ["f(scale=float32[2,3])"]


def test_what_has_no_text_is_an_error_where_the_part_is_made():
    message = r"option is .*no text that is the same in every program"
    for value in (object(), lambda x: x, {1, 2}, [print]):
        refused(message, sc.Spec.of, "f", option=value, error=TypeError)


@pytest.mark.slow
def test_a_part_without_a_spec_trains_and_has_no_metadata():
    allreduce, correction = (
        x._replace(spec=None) for x in (TOPK_A, optax_ext.momentum_correction(0.9))
    )
    known = own_selector(a=1)
    for state, message in (
        (state_of(own_selector()), r"selector.*no spec.*\.Selector\(.*spec=.*Spec\.of"),
        (state_of(known, allreduce), r"allreduce.*no spec.*SparseAllreduce\("),
        (state_of(known, correction=correction), r"correction.*no spec.*optax_ext\.MomentumCorr"),
    ):
        refused(message, optax_ext.checkpoint_metadata, state)
    both = optax_ext.topk_a(0.1, axis="w"), transformation(own_selector(), allreduce)
    same(*(run(tx, normal((1, 2, 40))).updates for tx in both))


def test_what_is_made_of_a_part_without_a_spec_has_none():
    unnamed = TOPK_A._replace(spec=None)
    assert sc.select.layerwise(own_selector()).spec is None
    assert sc.select.scheduled(own_selector(), 0.1).spec is None
    assert sc.allreduce.topk_a(codec=sc.wire.raw()._replace(spec=None)).spec is None
    assert sc.allreduce.hierarchical(inner_axis="d", outer=unnamed).spec is None


@pytest.mark.parametrize(
    "part",
    [
        sc.allreduce.ok_topk(density=0.1),
        sc.allreduce.published.dsar_split_allgather(),
        sc.select.topk(density=0.1),
        sc.select.published.sidco(density=0.1),
    ],
    ids=lambda part: part.spec.name,
)
def test_a_spec_has_the_arguments_of_a_factory_and_no_local_variable(part):
    """So metadata stays the same when a variable inside gets another name."""
    rows, name = sc.cost_model.ALGORITHMS, part.spec.name
    factory = rows[name].factory if name in rows else selector_factory(name)
    assert {name for name, _ in part.spec.arguments} == set(inspect.signature(factory).parameters)


# Both packages share axes, types, equations, checks of arguments, hashes and platforms.
SHARED = {"_axes", "_varying", "_jaxprs", "_validation", "_hash", "_platform", "_sparse_ops"}
FILES = sorted(pathlib.Path(optax_ext.__file__).parent.rglob("*.py"))


def private(name):
    first, *rest = name.removeprefix("sparse_collectives.").split(".")
    if first in SHARED:
        name = ".".join(rest)
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def underscored(source):
    """Private modules and names of sparse_collectives that a program reaches."""
    nodes, reached, bound = list(ast.walk(ast.parse(source))), [], set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = {alias.name: alias.asname or "sparse_collectives" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {f"{node.module}.{x.name}": x.asname or x.name for x in node.names}
        else:
            continue
        names = {name: at for name, at in names.items() if name.startswith("sparse_collectives")}
        reached += names
        bound |= set(names.values())
    for node in nodes:
        first, _, rest = (
            ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else [""] * 3
        )
        reached += [rest] if first in bound else []
    return [name for name in reached if private(name)]


def test_nothing_underscored_is_imported():
    assert len(FILES) > 20
    assert {file.name: found for file in FILES if (found := underscored(file.read_text()))} == {}


def test_an_import_of_something_private_would_be_noticed():
    assert underscored("import sparse_collectives._spec")
    assert underscored("from sparse_collectives import _spec")
    assert underscored("from sparse_collectives.allreduce._parts import regions")
    assert underscored("import sparse_collectives as sc\nsc._spec.Spec")
    assert underscored("from sparse_collectives import select\nselect._thresholds.slots_for")


def test_what_is_declared_is_there_and_nothing_else():
    public = {name for name in vars(extend) if not name.startswith("_")}
    assert list(extend.__all__) == sorted(public)
