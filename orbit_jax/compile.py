"""The one place that calls `jax.jit`: compiler options by platform, donation, and trace counts.

Equal log-probs need compiler options. They are attached to each jit by the program, never taken
from the environment, and unknown names would raise, hence one table per platform and recipe.
"""

import functools
from collections.abc import Callable, Sequence

import jax

# CPU. `fast` keeps every dot in a library call of its own: otherwise reductions and exp are absorbed
# into kernels whose result depends on the shape. Excess precision would keep f32 values where the
# program says bf16. Loop-invariant code motion would widen whole stacks of weights ahead of a loop.
# GPU. The autotuner may pick another tile or split-K for the same shape in another program.
_OPTIONS: dict[tuple[str, str], dict[str, str | bool | int]] = {
    ("cpu", "fast"): {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
        "xla_allow_excess_precision": False,
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion,float-normalization-bf16",
    },
    ("cpu", "tiles"): {
        "xla_allow_excess_precision": False,
        "xla_disable_hlo_passes": "while-loop-invariant-code-motion,float-normalization-bf16",
    },
    ("gpu", "fast"): {"xla_allow_excess_precision": False},
    ("gpu", "tiles"): {
        "xla_allow_excess_precision": False,
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,
    },
}


def options(recipe: str, platform: str | None = None) -> dict[str, str | bool | int]:
    """Compiler options of a parity recipe on a platform (default: the one in use)."""
    return dict(_OPTIONS.get((platform or jax.default_backend(), recipe), {}))


def jit(
    fn: Callable,
    compiler_options: dict[str, str | bool | int],
    *,
    static_argnames: Sequence[str] = (),
    donate_argnames: Sequence[str] = (),
) -> Callable:
    """`jax.jit` with the options; the result's `traces` attribute counts how often it was traced."""

    @functools.wraps(fn)
    def counted(*args, **kwargs):
        compiled.traces += 1
        return fn(*args, **kwargs)

    # A plain attribute on the jitted function would be refused, so a thin callable carries it.
    class _Program:
        traces = 0
        lower = None

        def __call__(self, *args, **kwargs):
            return jitted(*args, **kwargs)

    jitted = jax.jit(
        counted,
        static_argnames=static_argnames,
        donate_argnames=donate_argnames,
        compiler_options=compiler_options,
    )
    compiled = _Program()
    compiled.lower = jitted.lower
    return compiled
