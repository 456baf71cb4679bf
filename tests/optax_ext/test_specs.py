"""What a part was made as: the same text in every program, another one for other arguments."""

import ast
import importlib
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext
import sparse_collectives as sc

PARAMS = jnp.zeros(40)


def own_selector(**arguments):
    """A selector as a user writes it, with a spec where there are arguments."""
    honest = sc.select.topk(density=0.1)
    spec = sc.Spec.of("own_selector", **arguments) if arguments else None
    return sc.Selector(honest.init, honest.select, spec=spec)


def state_of(selector, allreduce=None, **options):
    allreduce = sc.allreduce.topk_a() if allreduce is None else allreduce
    tx = optax_ext.sparse_allreduce(selector, allreduce, axis="w", **options)
    return optax_ext.init_state(tx, PARAMS, {"w": 2})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0.1, 0.2), (0.1, 0.3)),
        (("a", (1, None)), ("a", (2, None))),
        ([1, 2], [1, 2, 3]),
        ({"a": 1, "b": (2,)}, {"a": 1, "b": (3,)}),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.array([0, 1, 3])),
        (np.arange(3), np.arange(3.0)),
        (jnp.ones(3), jnp.array([1.0, 1.0, 2.0])),
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
    states = [state_of(own_selector(option=option)) for option in (one, other, one)]
    first, second, again = (state.settings for state in states)
    assert first == again
    assert first != second
    assert "0x" not in first.selector
    saved = optax_ext.checkpoint_metadata(states[0])
    optax_ext.check_metadata(saved, states[2])
    with pytest.raises(ValueError, match=r"selector: own_selector\(option="):
        optax_ext.check_metadata(saved, states[1])


def test_the_order_of_arguments_makes_no_difference():
    assert sc.Spec.of("f", a={"x": 1, "y": 2}, b=3) == sc.Spec.of("f", b=3, a={"y": 2, "x": 1})
    assert str(sc.Spec.of("f", b=3, a=None)) == "f(a=None, b=3)"


def test_a_tracer_among_the_arguments_is_described_without_its_content():
    specs = []

    @jax.jit
    def traced(x):
        specs.append(str(sc.Spec.of("f", scale=x)))
        return x

    traced(jnp.zeros((2, 3)))
    assert specs == ["f(scale=float32[2,3])"]


@pytest.mark.parametrize("value", [object(), lambda x: x, {1, 2}, [print]])
def test_what_has_no_text_is_an_error_where_the_part_is_made(value):
    with pytest.raises(TypeError, match=r"option is .*no text that is the same in every program"):
        sc.Spec.of("f", option=value)


def test_two_selectors_of_a_user_are_not_the_same():
    """With a spec their names and arguments tell; without one nothing does, and that is said."""
    assert own_selector(a=1).spec != own_selector(a=2).spec
    assert own_selector(a=1) != own_selector(a=1)._replace(spec=sc.Spec.of("another", a=1))
    states = [state_of(own_selector(a=a)) for a in (1, 2)]
    assert jax.tree.structure(states[0]) != jax.tree.structure(states[1])
    metadata = [optax_ext.checkpoint_metadata(state) for state in states]
    assert metadata[0] != metadata[1]


@pytest.mark.slow
def test_a_part_without_a_spec_trains_and_has_no_metadata():
    state = state_of(own_selector())
    message = r"selector declares no spec.*sparse_collectives\.Selector\(.*spec=.*Spec\.of"
    with pytest.raises(ValueError, match=message):
        optax_ext.checkpoint_metadata(state)
    allreduce = sc.allreduce.topk_a()._replace(spec=None)
    with pytest.raises(ValueError, match=r"allreduce declares no spec.*SparseAllreduce\("):
        optax_ext.checkpoint_metadata(state_of(own_selector(a=1), allreduce))
    correction = optax_ext.momentum_correction(0.9)._replace(spec=None)
    with pytest.raises(ValueError, match=r"correction declares no spec.*optax_ext\.MomentumCorr"):
        optax_ext.checkpoint_metadata(state_of(own_selector(a=1), correction=correction))
    tx = optax_ext.sparse_allreduce(own_selector(), allreduce, axis="w")
    step = sc.simulate(lambda g: tx.update(g, tx.init(g))[0], axis="w", axis_size=2)
    gradient = jnp.arange(80.0).reshape(2, 40)
    expected = optax_ext.topk_a(0.1, axis="w")
    wanted = sc.simulate(lambda g: expected.update(g, expected.init(g))[0], axis="w", axis_size=2)
    np.testing.assert_array_equal(step(gradient), wanted(gradient))


@pytest.mark.parametrize(
    "part",
    [
        sc.select.layerwise(own_selector()),
        sc.select.scheduled(own_selector(), 0.1),
        sc.allreduce.topk_a(codec=sc.wire.raw()._replace(spec=None)),
        sc.allreduce.hierarchical(inner_axis="d", outer=sc.allreduce.topk_a()._replace(spec=None)),
    ],
)
def test_what_is_made_of_a_part_without_a_spec_has_none(part):
    assert part.spec is None


def renamed(module):
    """The module with other names for all local variables and inner functions."""
    tree = ast.parse(inspect.getsource(module))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    arguments = {
        a.arg
        for n in ast.walk(tree)
        if isinstance(n, ast.arguments)
        for a in [*n.posonlyargs, *n.args, *n.kwonlyargs, *filter(None, [n.vararg, n.kwarg])]
    }
    inner = {
        n.name for f in functions for n in ast.walk(f) if isinstance(n, ast.FunctionDef) and n != f
    }
    names = inner | {
        n.id
        for f in functions
        for n in ast.walk(f)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    # Arguments are part of the interface, of the functions inside as well.
    names -= arguments

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node):
            node.id = f"other_{node.id}" if node.id in names else node.id
            return node

        def visit_FunctionDef(self, node):
            node.name = f"other_{node.name}" if node.name in names else node.name
            return self.generic_visit(node)

        def visit_ClassDef(self, node):
            return node  # The fields of a state are no variables.

        def visit_Nonlocal(self, node):
            node.names = [f"other_{name}" if name in names else name for name in node.names]
            return node

    copy = types.ModuleType(module.__name__)
    exec(compile(Rename().visit(tree), module.__file__, "exec"), copy.__dict__)
    return copy, names


@pytest.mark.parametrize(
    ("package", "file", "factory", "arguments", "local"),
    [
        ("allreduce.ok_topk", "_composition", "ok_topk", {"density": 0.1}, "chosen_codec"),
        ("allreduce", "_dsar_split_allgather", "dsar_split_allgather", {}, "reduce"),
        ("allreduce", "_gtopk", "gtopk", {"density": 0.1}, "reduce"),
        ("select", "_topk", "topk", {"density": 0.1}, "select"),
        ("select", "_sidco", "sidco", {"density": 0.1}, "select"),
        ("select", "_threshold_reuse", "threshold_reuse", {"density": 0.1}, "select"),
    ],
)
def test_metadata_does_not_depend_on_the_names_of_local_variables(
    package, file, factory, arguments, local
):
    module = importlib.import_module(f"sparse_collectives.{package}.{file}")
    copy, names = renamed(module)
    assert local in names
    pair = [getattr(m, factory)(**arguments) for m in (module, copy)]
    assert pair[0].spec == pair[1].spec
    if package == "select":
        states = [state_of(part) for part in pair]
    else:
        states = [state_of(sc.select.topk(density=0.1), part) for part in pair]
    metadata = [optax_ext.checkpoint_metadata(state) for state in states]
    # Its own classes of states have the same fields.
    assert metadata[0] == metadata[1]
    optax_ext.check_metadata(metadata[0], states[1])
