"""What is decided before a run: base, adapters, whether its batch fits and layers are kept."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest

from orbit_jax import startup
from orbit_jax.config import Config, from_config_dict


def loaded(monkeypatch, free_bytes: float, **ppo) -> tuple[Config, startup.Frozen]:
    monkeypatch.setattr(startup, "_free_bytes", lambda: free_bytes)
    config = from_config_dict({"base": {"working_copy": "never"}, "ppo": ppo})
    return config, startup.load(config)


def needed(monkeypatch, *, remat: bool) -> int:
    config, frozen = loaded(monkeypatch, 1e12)
    model = dataclasses.replace(frozen.model, remat=remat)
    return startup._estimate(config, model).total


def test_layers_are_kept_where_there_is_room_and_made_again_where_not(monkeypatch):
    roomy = needed(monkeypatch, remat=False) / startup._ROOMY
    config, frozen = loaded(monkeypatch, roomy + 1)
    assert not frozen.model.remat
    assert "for the backward pass, kept" in startup.memory_sentence(config, frozen)
    config, frozen = loaded(monkeypatch, roomy - 1)
    assert frozen.model.remat
    assert "made again layer by layer" in startup.memory_sentence(config, frozen)


def test_the_config_may_decide_on_remat_itself(monkeypatch):
    assert loaded(monkeypatch, 1e12, remat="always")[1].model.remat
    tight = needed(monkeypatch, remat=False) + 1
    assert not loaded(monkeypatch, tight, remat="never")[1].model.remat


def test_a_batch_that_does_not_fit_is_refused_before_loading(monkeypatch):
    too_little = needed(monkeypatch, remat=True) - 1
    with pytest.raises(ValueError, match=r"need about .* GB are free: raise ppo.micro_batches"):
        loaded(monkeypatch, too_little)


def test_fewer_slots_than_rollouts_need_a_smaller_cache():
    whole, few = Config(), from_config_dict({"sampler": {"slots": 64}})
    assert (whole.decoded_rows, few.decoded_rows) == (256, 64)
    with pytest.raises(ValueError, match=r"sampler.slots=300: must be at most the 256 rollouts"):
        from_config_dict({"sampler": {"slots": 300}})


MODELS = Path(__file__).parents[1] / "configs/models"


def rehearsal(folder: Path, **fields) -> Config:
    base = {"path": str(folder), "weights": "random", "working_copy": "never"}
    return from_config_dict({"base": base, **fields})


def changed(folder: Path, **fields) -> Path:
    """The tiny Kimi's configuration with other fields."""
    facts = json.loads((MODELS / "kimi_k2_tiny/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | fields))
    return folder


def test_a_rehearsal_needs_no_more_than_a_config(tmp_path: Path):
    config = rehearsal(changed(tmp_path))
    frozen = startup.load(config)
    assert frozen.packed_bytes == startup._estimate(config, frozen.model).base
    assert frozen.tokenizer.vocab_size == 261  # a token a byte, and five more
    assert startup.load(rehearsal(tmp_path, seed=1)).hash != frozen.hash


def test_a_rehearsal_has_the_tokenizer_of_its_folder_if_there_is_one(tmp_path: Path):
    for file in (MODELS.parents[1] / "tests/goldens/tokenizers/kimi").iterdir():
        shutil.copy(file, tmp_path)
    config = rehearsal(changed(tmp_path, vocab_size=4096))
    assert startup.load(config).tokenizer.vocab_size != 261


def test_a_vocabulary_below_a_token_a_byte_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"vocab_size=256, too small for the byte tokenizer's 261"):
        startup.load(rehearsal(changed(tmp_path, vocab_size=256)))


def test_a_config_without_weights_says_what_to_do():
    config = from_config_dict({"base": {"path": str(MODELS / "kimi_k2")}})
    with pytest.raises(
        ValueError, match=r"no weights: download .* or set base.weights to 'random'"
    ):
        startup.load(config)


def test_a_gguf_file_is_not_rehearsed():
    with pytest.raises(ValueError, match="a GGUF file holds its weights"):
        startup.load(rehearsal(Path("model.gguf")))


def ranks(adapter) -> dict[str, int]:
    """By the names of weights in a layer of the second stack."""
    leaves = jax.tree_util.tree_leaves_with_path(adapter.params["layers"][1])
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name.removesuffix(".a"): a.shape[-2] for name, a in named.items() if name[-2:] == ".a"}


def test_policy_and_critic_have_their_own_ranks_and_targets():
    adapter = {
        "targets": ("o_proj", "up_proj"),
        "overrides": ("experts.up_proj:2", "o_proj:3"),
        "critic_targets": ("o_proj", "shared_experts.up_proj"),
    }
    config = rehearsal(MODELS / "kimi_k2_tiny", adapter=adapter, ppo={"advantage": "gae"})
    state = startup.train_state(config, startup.load(config))
    both = {"self_attn.o_proj": 3, "mlp.shared_experts.up_proj": 16}
    assert ranks(state.policy) == both | {"mlp.experts.up_proj": 2}
    assert ranks(state.critic.adapter) == both


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        ({"critic_targets": ("q_proj",)}, r"critic_targets=\('q_proj',\): .* match no weight"),
        ({"overrides": ("q_proj:2",)}, "adapter.overrides: .'q_proj'. match no adapted weight"),
        ({"overrides": ("up_proj:65",)}, "ranks must be at most the model's width, 64"),
    ],
)
def test_an_adapter_that_does_not_fit_the_base_is_refused(adapter: dict, sentence: str):
    config = rehearsal(MODELS / "kimi_k2_tiny", adapter=adapter, ppo={"advantage": "gae"})
    with pytest.raises(ValueError, match=sentence):
        startup.train_state(config, startup.load(config))
