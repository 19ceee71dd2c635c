"""One thread, as for the other tests of many small models."""

from tests.parity.conftest import one_thread

__all__ = ["one_thread"]
