import pytest
from lab import MOE, TOY, Lab

from orbit_jax.adapters.adapter import LINEAR_LAYERS


@pytest.fixture(scope="session")
def moe() -> Lab:
    return Lab(MOE, LINEAR_LAYERS)


@pytest.fixture(scope="session")
def toy() -> Lab:
    return Lab(TOY, ("down_proj",))
