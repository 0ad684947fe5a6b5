"""The compiled loop makes exactly the records of the plain one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.simulate import StepCost, Work, simulate
from tests.simulate.cases import Case, cases

seconds = st.floats(1e-9, 10.0)
coefficients = st.builds(Work, *[seconds] * 6)


@settings(deadline=None)
@given(case=cases(), fixed=coefficients, compute=coefficients, memory=coefficients)
def test_compiled_equals_plain_to_the_last_bit(case: Case, fixed: Work, compute: Work, memory: Work) -> None:
    cost = StepCost(fixed, compute, memory)
    plain, compiled = (
        simulate(case.requests, case.settings, cost, max_concurrency=case.max_concurrency, compiled=compiled)
        for compiled in (False, True)
    )
    assert compiled == plain
