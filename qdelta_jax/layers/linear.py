"""Linear layers, and how arrays of different precision meet in them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.mesh import vary, varying
from qdelta_jax.kept import activation
from qdelta_jax.layers.inputs import check_dtypes
from qdelta_jax.layers.partitioning import Axes, partitioned

__all__ = ["Initializer", "Linear", "LowRank", "xavier_uniform"]

Initializer = Callable[..., Array]


SMALL = 1 << 16
"""Numbers of a kernel whose gradient, a sum over all tokens, has work for a few of a GPU's processors only, as one
product: there each row of a batch makes its own, and they are added."""


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Uniform in +-gain sqrt(6 / (fan_in + fan_out)).

    `gain=2**-2.5` is the initialisation of Gated DeltaNet-2 (arXiv 2605.22791).
    """
    return nnx.initializers.variance_scaling(gain**2, "fan_avg", "uniform")


def wider(*dtypes: Any) -> Any:
    """The widest of some float dtypes, whatever the promotion mode; float32 for bfloat16 with float16."""
    found = {jnp.dtype(dtype) for dtype in dtypes}
    if len(found) == 1:
        return found.pop()
    return jnp.dtype(jnp.float64) if jnp.dtype(jnp.float64) in found else jnp.dtype(jnp.float32)


def widened(x: Array) -> Array:
    """x in float32, or in float64 if it is: where norms, gates and activations are computed."""
    return x.astype(wider(x.dtype, jnp.float32))


def product(x: Array, kernel: Array, *, axis: int = 0, out_dtype: Any = None) -> Array:
    """sum_i x[.., i] kernel[i, :], or kernel[:, i] for `axis` 1; both of one dtype, the sum in `out_dtype`.

    Of 16-bit operands the gradient of a wider sum is rounded before it meets them, as that of any other sum is:
    products with a float32 gradient would take three times as long. Derivatives are then in reverse mode, of any order.
    """
    wide = jnp.dtype(out_dtype or x.dtype)
    if wide != x.dtype and x.dtype.itemsize == 2:
        return _widening(vary(x, varying(kernel)), vary(kernel, varying(x)), axis, wide)
    if x.ndim == 3 and kernel.size <= SMALL and jax.default_backend() == "gpu":
        kernels = jnp.broadcast_to(kernel, (x.shape[0], *kernel.shape))
        return lax.dot_general(x, kernels, (((2,), (1 + axis,)), ((0,), (0,))), preferred_element_type=wide)
    return _product(x, kernel, axis, wide)


def _product(x: Array, kernel: Array, axis: int, out_dtype: Any) -> Array:
    return lax.dot_general(x, kernel, (((x.ndim - 1,), (axis,)), ((), ())), preferred_element_type=out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _widening(x: Array, kernel: Array, axis: int, out_dtype: Any) -> Array:
    return _product(x, kernel, axis, out_dtype)


def _widening_forward(x: Array, kernel: Array, axis: int, out_dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, kernel, axis, out_dtype), (x, kernel)


def _widening_backward(axis: int, out_dtype: Any, saved: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
    x, kernel = saved
    d_y = d_y.astype(x.dtype)
    lead = tuple(range(x.ndim - 1))
    pair = (x, d_y) if axis == 0 else (d_y, x)
    d_kernel = lax.dot_general(*pair, ((lead, lead), ((), ())), preferred_element_type=kernel.dtype)
    return _product(d_y, kernel, 1 - axis, x.dtype), d_kernel


_widening.defvjp(_widening_forward, _widening_backward)


class Linear(nnx.Module):
    """y = x kernel + bias.

    Args:
        in_features, out_features: sizes of the last axis before and after.
        axes: logical axes of the kernel [in_features, out_features], for layers/partitioning.py.
        use_bias: adds `bias` [out_features], zero at first.
        kernel_init: initializer (key, shape, dtype) -> array; LeCun normal by default.
        dtype: of the product and the result; None for the wider of the input's and the parameters'.
        param_dtype: of the parameters.
        rngs: the stream `params` is used.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axes: Axes = ("embed", "heads"),
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_dtypes(dtype, param_dtype)
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        kernel = partitioned(kernel_init or nnx.initializers.lecun_normal(), axes)
        self.kernel = nnx.Param(kernel(rngs.params(), (in_features, out_features), param_dtype))
        zeros = partitioned(nnx.initializers.zeros, axes[-1:])
        self.bias = nnx.Param(zeros(rngs.params(), (out_features,), param_dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "*lead inner"], *, out_dtype: Any = None) -> Float[Array, "*lead outer"]:
        """`out_dtype` asks for a result wider than the operands, without rounding in between."""
        y = product(*self._operands(x), out_dtype=out_dtype)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias.get_value().astype(y.dtype), y.shape)
        return y

    def _operands(self, x: Array) -> tuple[Array, Array]:
        """x and the kernel in the dtype of the product."""
        kernel = self.kernel.get_value()
        dtype = self.dtype or wider(x.dtype, kernel.dtype)
        return x.astype(dtype), kernel if kernel.dtype == dtype else activation(kernel.astype(dtype))


def project_together(
    x: Float[Array, "*lead inner"], layers: Sequence[Linear], *, out_dtype: Any = None
) -> list[Float[Array, "*lead outer"]]:
    """[layer(x, out_dtype=out_dtype) for layer in layers], as one product: of layers of one precision, without bias."""
    (x, *_), kernels = zip(*(layer._operands(x) for layer in layers), strict=True)
    y = product(x, jnp.concatenate(kernels, axis=1), out_dtype=out_dtype)
    return jnp.split(y, np.cumsum([layer.out_features for layer in layers])[:-1].tolist(), axis=-1)


class LowRank(nnx.Module):
    """y = (x down) up + bias, through `rank` features; only `up` has the bias. Arguments as in `Linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        axes: Axes = ("embed", "heads"),
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {
            "kernel_init": kernel_init,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.down = Linear(in_features, rank, axes=(axes[0], None), **options)
        self.up = Linear(rank, out_features, axes=(None, axes[1]), use_bias=use_bias, **options)

    def __call__(self, x: Float[Array, "*lead inner"], *, out_dtype: Any = None) -> Float[Array, "*lead outer"]:
        return self.up(self.down(x), out_dtype=out_dtype)
