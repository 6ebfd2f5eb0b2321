"""Broken checkpoints: a sentence or the true weights; never another error, never other weights.

Each mutation changes one thing of a small valid folder: bytes or entries of a header, the length of
a file, the index, or a value of a configuration.
"""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deployed
import jax
import numpy as np
import pytest
from deployed import CASES

from orbit_jax.checkpoint.huggingface import Contents, open_base
from orbit_jax.checkpoint.leaf_tensors import pieces
from orbit_jax.checkpoint.safetensors_io import INDEX_FILE
from orbit_jax.quant.qtensor import QTensor, dequantize

MUTATIONS = 60  # of each folder
FOLDERS = ("deepseek", "gpt_oss", "gptq", "ct_fp8_block", "modelopt_nvfp4", "kimi")
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 31, 64, 10**30, -(10**30), 0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "re:(", "\ud800", "../config.json", "U8", "F8_E8M0"),
    *([], [[]], {}, {"a": {}}, [None], [1, 2], [16, 16], [True, 1], ["re:[", 3], [0, -5]),
    *({"weights": 3}, {"a": {"weights": {"num_bits": 4}}}, "model.safetensors", "gptq", "group"),
]

Weights = dict[str, Any]


def weights_of(contents: Contents) -> Weights:
    """Every weight and vector of a folder, read as `load_base` reads them."""
    found = {}
    for leaf in jax.tree.leaves(contents.layout):
        name = leaf.modules[0].split(".")[-1] + str(leaf.rows) + leaf.parameter
        first = int(leaf.modules[0].split(".")[2]) if leaf.lead else 0
        for (*start,), piece, _ in pieces(leaf, contents.scheme[leaf], contents.refs):
            if leaf.lead:
                start[0] += first
            group = ".experts" in leaf.modules[0], ".shared" in leaf.modules[0]
            found[f"{name} {group} {start}"] = jax.tree.map(np.array, piece)
    return found


def are_equal(a: Weights, b: Weights) -> bool:
    if a.keys() != b.keys():
        return False
    for name, x in a.items():
        same = jax.tree.structure(x) == jax.tree.structure(b[name]) and all(
            np.array_equal(*(np.ascontiguousarray(f).view(np.uint8) for f in pair))
            for pair in zip(jax.tree.leaves(x), jax.tree.leaves(b[name]), strict=True)
        )
        if not same:  # held in another way: the values must still be the same
            wide = [dequantize(q, "float32") if isinstance(q, QTensor) else q for q in (x, b[name])]
            if not np.array_equal(*wide):
                return False
    return True


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Where every value within a JSON value stands."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(child, (*path, key))
    return found


def with_a_change(value: Any, rng: random.Random) -> Any:
    """A JSON value in which one value is replaced, removed, or stands under another name too."""
    value = copy.deepcopy(value)
    *path, last = rng.choice(places(value))
    parent = value
    for key in path:
        parent = parent[key]
    kind = rng.choice(["replace"] * 4 + ["remove", "rename", "swap"])
    if kind == "replace" or isinstance(parent, list):
        parent[last] = copy.deepcopy(rng.choice(VALUES))
    elif kind == "remove":
        del parent[last]
    elif kind == "rename" or isinstance(parent[last], dict):
        # Not exchanged: a header in which two tensors change places is as true as before.
        parent[rng.choice(["x", str(last) + "x", str(last)[:-1]])] = parent.pop(last)
    else:
        other = rng.choice(list(parent))
        parent[last], parent[other] = parent[other], parent[last]
    return value


def rewrite_json(path: Path, rng: random.Random) -> None:
    path.write_text(json.dumps(with_a_change(json.loads(path.read_text()), rng)))


def rewrite_quantization(path: Path, rng: random.Random) -> None:
    hf = json.loads(path.read_text())
    place = hf if "quantization_config" in hf else hf.get("text_config", {})
    if "quantization_config" not in place:
        path = path.with_name("hf_quant_config.json")
        hf = place = json.loads(path.read_text())
        hf["quantization"] = with_a_change(hf["quantization"], rng)
    else:
        place["quantization_config"] = with_a_change(place["quantization_config"], rng)
    path.write_text(json.dumps(hf))


def rewrite_header(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    names = rng.sample(list(header), 2)
    if rng.random() < 0.2:  # one tensor where another is
        header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
        text = json.dumps(header).encode()
    elif rng.random() < 0.1:
        text = json.dumps(header).encode()[:-1] + b', "x": {}, "x": {}}'
    else:
        text = json.dumps(with_a_change(header, rng)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def flip_header(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    for _ in range(rng.choice([1, 1, 3])):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def resize(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    kept = rng.choice([0, 7, 8, 100, len(data) // 2, len(data) - 1])
    path.write_bytes(data + b"\0" if rng.random() < 0.2 else data[:kept])


def mutate(folder: Path, rng: random.Random) -> str:
    """Changes one thing of a folder; says which."""
    files = sorted(folder.glob("*.safetensors"))
    ways: list[tuple[Callable, Path]] = [
        *[(rewrite_header, rng.choice(files))] * 4,
        *[(flip_header, rng.choice(files))] * 4,
        (resize, rng.choice(files)),
        *[(rewrite_quantization, folder / "config.json")] * 4,
        *[(rewrite_json, folder / "config.json")] * 2,
    ]
    if (folder / INDEX_FILE).exists():
        ways += [(rewrite_json, folder / INDEX_FILE)] * 4
    way, path = rng.choice(ways)
    way(path, rng)
    return f"{way.__name__} of {path.name}"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_broken_checkpoint_is_refused_in_a_sentence_or_has_its_own_weights(
    name: str, tmp_path: Path
):
    original = tmp_path / "original"
    deployed.write(CASES[name](), original, shards=2 if name in ("gpt_oss", "kimi") else 1)
    expected = weights_of(open_base(original))
    outcomes = []
    for seed in range(MUTATIONS):
        folder = shutil.copytree(original, tmp_path / str(seed))
        what = mutate(folder, random.Random(f"{name}{seed}"))
        outcomes.append(outcome(folder, expected))
        assert outcomes[-1] in ("refused", "the same"), f"{what}, {seed=}"
        shutil.rmtree(folder)
    assert outcomes.count("refused") > MUTATIONS / 3


def outcome(folder: Path, expected: Weights) -> str:
    try:
        found = weights_of(open_base(folder))
    except Exception as error:
        sentence = str(error)
        if type(error) is not ValueError or "\n" in sentence or not 20 < len(sentence) < 3000:
            return f"{type(error).__name__}: {sentence}"
        return "refused"
    return "the same" if are_equal(found, expected) else "other weights"
