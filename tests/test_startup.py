"""What is decided before a run: whether its batch fits the memory, and whether layers are kept."""

import pytest

from orbit_jax import startup
from orbit_jax.config import Config, from_config_dict


def loaded(monkeypatch, free_bytes: float, **ppo) -> tuple[Config, startup.Frozen]:
    monkeypatch.setattr(startup, "_free_bytes", lambda: free_bytes)
    config = from_config_dict({"base": {"working_copy": "never"}, "ppo": ppo})
    return config, startup.load(config)


def needed(monkeypatch, layers: int) -> int:
    config, frozen = loaded(monkeypatch, 1e12)
    return startup._estimate(config, frozen.model).total(layers)


def test_layers_are_kept_where_there_is_room_and_made_again_where_not(monkeypatch):
    roomy = needed(monkeypatch, layers=3) / startup._ROOMY
    config, frozen = loaded(monkeypatch, roomy + 1)
    assert not frozen.model.remat
    assert "for the backward pass, kept" in startup.memory_sentence(config, frozen)
    config, frozen = loaded(monkeypatch, roomy - 1)
    assert frozen.model.remat
    assert "made again layer by layer" in startup.memory_sentence(config, frozen)


def test_the_config_may_decide_on_remat_itself(monkeypatch):
    assert loaded(monkeypatch, 1e12, remat="always")[1].model.remat
    tight = needed(monkeypatch, layers=3) + 1
    assert not loaded(monkeypatch, tight, remat="never")[1].model.remat


def test_a_batch_that_does_not_fit_is_refused_before_loading(monkeypatch):
    too_little = needed(monkeypatch, layers=1) - 1
    with pytest.raises(ValueError, match=r"need about .* GB are free: raise ppo.micro_batches"):
        loaded(monkeypatch, too_little)


def test_fewer_slots_than_rollouts_need_a_smaller_cache():
    whole, few = Config(), from_config_dict({"sampler": {"slots": 64}})
    assert (whole.decoded_rows, few.decoded_rows) == (256, 64)
    with pytest.raises(ValueError, match=r"sampler.slots=300: must be at most the 256 rollouts"):
        from_config_dict({"sampler": {"slots": 300}})
