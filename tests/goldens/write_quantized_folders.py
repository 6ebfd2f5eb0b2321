"""Writes the folders of `quantized/`: tiny models out of other goldens, as this project quantises.

Development only: `make goldens`. `make_quantized_goldens.py` reads them with other packages.
"""

import shutil
from pathlib import Path

from orbit_jax.checkpoint.quantized_plan import make_plan
from orbit_jax.checkpoint.write_quantized import save_quantized

GOLDENS = Path(__file__).parent
FOLDER = GOLDENS / "quantized"
ATTENTION = r"re:.*layers\.0\.self_attn\..*"
# Name to the plain folder, the format and what else `make_plan` takes.
CASES = {
    "int4_experts": ("families/mixtral", "int4", {"only": "experts", "group": 16}),
    "int4": ("families/mixtral", "int4", {"ignore": [ATTENTION]}),
    "fp8": ("families/mixtral", "fp8", {}),
    "mxfp4": ("families/mixtral", "mxfp4", {}),
    "nvfp4": ("families/mixtral", "nvfp4", {}),
    "nvfp4_dense": ("families/llama_linear", "nvfp4", {}),
    "mxfp4_blocks": ("families/gpt_oss", "mxfp4", {}),
}


def write(name: str, folder: Path) -> None:
    """Quantises the plain checkpoint of a case into a new folder, without its goldens."""
    source, form, choices = CASES[name]
    save_quantized(folder, make_plan(GOLDENS / source, form, **choices))
    (folder / "reference.npz").unlink(missing_ok=True)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in CASES:
        write(name, FOLDER / name)


if __name__ == "__main__":
    main()
