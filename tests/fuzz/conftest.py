"""One thread, as for the other tests of many small models, and no way round plait that a clock decides on."""

from collections.abc import Iterator

import pytest

from tests.parity.conftest import one_thread

__all__ = ["always_planned", "one_thread"]


@pytest.fixture(autouse=True, scope="module")
def always_planned() -> Iterator[None]:
    """Failures are reproduced by their script alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLAIT_ASIDE", "0")
        yield
