import pytest
from lab import MOE, TOY, Lab

from orbit_jax.adapters.adapter import LINEAR_LAYERS
from orbit_jax.adapters.oft import OFT


@pytest.fixture(scope="session")
def moe() -> Lab:
    return Lab(MOE, LINEAR_LAYERS)


@pytest.fixture(scope="session")
def rotated() -> Lab:
    return Lab(MOE, LINEAR_LAYERS, OFT(8))


@pytest.fixture(scope="session")
def toy() -> Lab:
    return Lab(TOY, ("down_proj",))
