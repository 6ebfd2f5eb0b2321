"""The one place that calls `jax.jit`: compiler options by platform, donation, and trace counts.

Equal log-probs need compiler options. They are attached to each jit by the program, never taken
from the environment, and unknown names would raise, hence one table per platform and recipe. They
hold at XLA's default optimisation level only: at level 0 equal rows of a dot differ.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

Options = dict[str, str | bool | int]

_CPU: Options = {
    # An f32 value may not be kept where the program says bf16.
    "xla_allow_excess_precision": False,
    # The first pass would widen whole stacks of weights ahead of a loop; the second turns a bf16
    # update of one row of a buffer into a round trip of the whole buffer through f32; the third
    # drops optimization barriers before fusion, which then makes operands of a gather many times.
    "xla_disable_hlo_passes": (
        "while-loop-invariant-code-motion,float-normalization-bf16,cse_barrier_expander"
    ),
    # Each dot is a library call of its own; otherwise reductions and exp are absorbed into kernels
    # whose result depends on the shape.
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
}
_GPU: Options = {
    "xla_allow_excess_precision": False,
    # It would widen weights, and make zeros as large as all gradients, ahead of a loop.
    "xla_disable_hlo_passes": (
        "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion"
    ),
    # Of a merged dot it may find no tiles and give up, where the library's kernels are there.
    "xla_gpu_enable_triton_gemm": False,
}
_OPTIONS: dict[tuple[str, str], Options] = {
    ("cpu", "fast"): _CPU,
    ("cpu", "tiles"): _CPU,
    ("gpu", "fast"): _GPU,
    # The autotuner may pick another tile or split-K for the same shape in another program.
    ("gpu", "tiles"): _GPU | {"xla_gpu_autotune_level": 0},
}


def options(recipe: str, platform: str | None = None) -> Options:
    """Compiler options of a parity recipe on a platform (default: the one in use)."""
    return dict(_OPTIONS.get((platform or jax.default_backend(), recipe), {}))


class Program:
    """A jitted function that counts how often it was traced. Make one with `jit`."""

    def __init__(self, fn: Callable, **jit_arguments: Any):
        self.traces = 0
        self._called: tuple[tuple, dict] = ((), {})

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.traces += 1
            return fn(*args, **kwargs)

        # jax.jit finds static and donated arguments by the names in this signature.
        functools.update_wrapper(counted, fn)
        self._jitted = jax.jit(counted, **jit_arguments)
        self.lower = self._jitted.lower

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, compiling it first for new shapes or static arguments."""
        self._called = jax.tree.map(_shape_of, (args, kwargs))
        return self._jitted(*args, **kwargs)

    @property
    def executables(self) -> int:
        """How many it has: more than traces where the same shapes came from elsewhere."""
        return self._jitted._cache_size()

    @property
    def text(self) -> str:
        """The last call's program as it was compiled, in HLO; nothing is compiled for it."""
        args, kwargs = self._called
        return self.lower(*args, **kwargs).compile().as_text()


def _shape_of(x: Any) -> Any:
    """Of an array what a program is compiled for, so that no array is kept."""
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def jit(
    fn: Callable,
    compiler_options: Options,
    *,
    static_argnames: Sequence[str] = (),
    donate_argnames: Sequence[str] = (),
) -> Program:
    """Compiles `fn` on first use, with options that belong to this program alone."""
    return Program(
        fn,
        compiler_options=compiler_options,
        static_argnames=static_argnames,
        donate_argnames=donate_argnames,
    )
