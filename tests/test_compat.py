"""The undocumented names of JAX stand in one module, each with a way out."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

PACKAGE = pathlib.Path(jax_flash.__file__).parent


def imported(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return names


def test_only_the_adapter_names_what_is_private():
    found = {
        str(path.relative_to(PACKAGE)): sorted(n for n in imported(path) if "jax._src" in n)
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {
        "compat.py": ["jax._src.dispatch.prim_requires_devices_during_lowering"]
    }


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
def test_lowering_knows_the_devices():
    # Fails with "Please file a bug" of custom_partitioning where JAX lowers a primitive without
    # the devices. If `compat.lower_with_devices` has lost the set it adds to: any primitive that
    # JAX itself lowers with devices (such as custom_partitioning), bound beside ours, does it too.
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones((2, 8, 2, 16)), NamedSharding(mesh, P("x")))
    text = jax.jit(jax_flash.dot_product_attention).lower(x, x, x).compile().as_text()
    # Each device has its own batch entry: nothing is gathered. (`num_devices` of the lowering's
    # context says that there are several; without it the call would run whole on each.)
    assert "all-gather" not in text
    assert "f32[1,8,2,16]" in text


def test_default_platform():
    # The rule of a platform without kernels learns its name from the lowering's context.
    shape = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)

    def flash(*x):
        return jax_flash.dot_product_attention(*x, implementation="flash")

    traced = jax.jit(flash).trace(shape, shape, shape)
    with pytest.raises(NotImplementedError, match="no kernel for platform 'tpu'"):
        traced.lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("name", ["eager", "jit", "grad", "jvp", "quantize"])
def test_debug_nans(name):
    # A RecursionError says that JAX calls the function of `compat.compile_alone` once more: its
    # `_run_python_pjit` reads a mark from it, as from what `jax._src.dispatch` makes of primitives.
    x = jnp.ones((1, 8, 2, 16))
    nan = x.at[0, 3].set(jnp.nan)

    def total(query):
        return jax_flash.dot_product_attention(query, x, x).sum()

    calls = {
        "eager": total,
        "jit": jax.jit(total),
        "grad": jax.grad(total),
        "jvp": lambda query: jax.jvp(total, (x,), (query,)),
        "quantize": jax_flash.quantize,
    }
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.* encountered in \w"):
        calls[name](nan)
