"""The compiled loop makes exactly the records of the plain one."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from llmexp.simulate import FrontEnd, Simulation, StepCost, Work, simulate
from llmexp.simulate.errors import TimeStandsStillError
from tests.simulate.cases import Case, cases

seconds = st.floats(1e-9, 10.0)
coefficients = st.builds(Work, *[seconds] * 6)
front_ends = st.builds(FrontEnd, *[st.just(0.0) | seconds] * 5)


@settings(deadline=None)
@given(
    case=cases(),
    fixed=coefficients,
    compute=coefficients,
    memory=coefficients,
    prefill_launch_s=st.just(0.0) | seconds,
    front_end=front_ends,
    keeps_place=st.booleans(),
    ahead=st.booleans(),
)
def test_compiled_equals_plain_to_the_last_bit(
    case: Case,
    fixed: Work,
    compute: Work,
    memory: Work,
    prefill_launch_s: float,
    front_end: FrontEnd,
    keeps_place: bool,
    ahead: bool,
) -> None:
    def outcome(compiled: bool) -> Simulation | str:
        try:
            return simulate(
                case.requests,
                replace(case.settings, async_scheduling=ahead),
                StepCost(fixed, compute, memory, prefill_launch_s),
                max_concurrency=case.max_concurrency,
                keeps_place=keeps_place,
                front_end=front_end,
                compiled=compiled,
            )
        except TimeStandsStillError as never:
            return str(never)

    assert outcome(compiled=True) == outcome(compiled=False)
