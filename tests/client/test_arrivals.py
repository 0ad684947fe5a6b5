import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from scipy import stats

from llmexp.client.arrivals import arrivals
from llmexp.errors import ConfigError, WorkloadError
from llmexp.schema.load import ClosedLoop, Constant, Gamma, LoadConfig, Poisson, Ramp, Trace

OPEN = [
    Constant(rate=7.0),
    Poisson(rate=7.0),
    Gamma(rate=7.0, burstiness=0.3),
    Ramp(start_rate=1.0, end_rate=9.0),
]


@pytest.mark.parametrize("load", OPEN)
@given(n=st.integers(0, 200), seed=st.integers(0, 5))
def test_arrivals_go_forward_and_follow_from_their_seed(load: LoadConfig, n: int, seed: int) -> None:
    due = arrivals(load, n, seed=seed)
    assert due is not None and due.shape == (n,)
    assert (due >= 0).all() and (np.diff(due) >= 0).all()
    again = arrivals(load, n, seed=seed)
    assert np.array_equal(due, again)  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [Poisson(rate=7.0), Gamma(rate=7.0)])
def test_other_seeds_give_other_arrivals(load: LoadConfig) -> None:
    assert not np.array_equal(arrivals(load, 50, seed=1), arrivals(load, 50, seed=2))  # type: ignore[arg-type]


def test_a_closed_loop_has_no_arrivals() -> None:
    assert arrivals(ClosedLoop(), 10) is None


def test_constant_gaps() -> None:
    assert arrivals(Constant(rate=4.0), 4) == pytest.approx([0.0, 0.25, 0.5, 0.75])


@pytest.mark.parametrize(
    ("load", "law"),
    [
        (Poisson(rate=5.0), stats.expon(scale=0.2)),
        (Gamma(rate=5.0, burstiness=0.4), stats.gamma(0.4, scale=0.5)),
        (Gamma(rate=5.0, burstiness=1.0), stats.expon(scale=0.2)),
        (Gamma(rate=5.0, burstiness=3.0), stats.gamma(3.0, scale=1 / 15)),
    ],
)
def test_random_gaps_follow_their_law(load: LoadConfig, law: stats.rv_continuous) -> None:
    due = arrivals(load, 5000, seed=3)
    assert due is not None
    assert stats.kstest(np.diff(due, prepend=0.0), law.cdf).pvalue > 0.01
    assert len(due) / due[-1] == pytest.approx(5.0, rel=0.1)


@given(start=st.floats(0.1, 50), end=st.floats(0.1, 50), n=st.integers(2, 300))
def test_a_ramp_serves_the_integral_of_its_rate(start: float, end: float, n: int) -> None:
    due = arrivals(Ramp(start_rate=start, end_rate=end), n)
    assert due is not None
    slope = (end - start) / due[-1]  # the rate reaches `end` with the last arrival
    assert start * due + slope * due**2 / 2 == pytest.approx(np.arange(n), abs=1e-6 * n)


def test_a_trace_is_replayed_at_its_speed() -> None:
    assert arrivals(Trace(speed=2.0), 3, offsets_s=np.array([0.0, 1.0, 5.0])) == pytest.approx([0.0, 0.5, 2.5])


def test_a_trace_that_goes_back_in_time_is_refused_by_its_request() -> None:
    with pytest.raises(WorkloadError, match=r"request 2 is due at 0\.5 s, request 1 at 1\.0 s"):
        arrivals(Trace(), 3, offsets_s=np.array([0.0, 1.0, 0.5]))
    with pytest.raises(WorkloadError, match=r"request 0 is due at -1\.0 s"):
        arrivals(Trace(), 1, offsets_s=np.array([-1.0]))


def test_a_trace_without_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="load: got trace"):
        arrivals(Trace(), 3)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"kind": "poisson", "rate": -1}, "rate"),
        ({"kind": "constant", "rate": 0}, "rate"),
        ({"kind": "gamma", "rate": 1, "burstiness": 0}, "burstiness"),
        ({"kind": "ramp", "start_rate": float("nan")}, "start_rate"),
        ({"kind": "trace", "speed": -2}, "speed"),
        ({"kind": "closed_loop", "concurrency": 0}, "concurrency"),
        ({"kind": "poisson", "max_in_flight": 0}, "max_in_flight"),
        ({"kind": "poisson", "concurrency": 4}, "concurrency"),
        ({"kind": "sawtooth"}, "sawtooth"),
    ],
)
def test_a_wrong_load_is_refused_by_its_key(config: dict[str, object], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        TypeAdapter(LoadConfig).validate_python(config)
