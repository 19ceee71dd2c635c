"""Random models, graphs and what users do between calls: the compiled model stays PyG's.

`make test` runs the same 500 sequences every time; `make fuzz SEQUENCES=20000 SEED=1` draws others
(tests/fuzz/many.py).
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.fuzz.replay import replay
from tests.fuzz.scripts import scripts


@settings(
    max_examples=500,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)
@given(scripts())
def test_the_compiled_model_stays_pygs_through_what_users_do(script: str) -> None:
    replay(script)
