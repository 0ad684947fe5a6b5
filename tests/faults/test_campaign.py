"""The fault campaign in a reduced form: one injection of each kind, at the stage where most is at stake."""

from collections.abc import Iterator

import pytest

from tests.faults.campaign import FAULTS, Fault, Site, parallel_studies, site

# The rest, and more of each, are for the full campaign: `python -m tests.faults.campaign OUT.jsonl`.
REDUCED = (
    "SIGKILL of llmexp | round",
    "SIGKILL of llmexp | logging",
    "SIGTERM | warm-up",
    "SIGINT twice | record",
    "SIGINT three times | round",
    "SIGKILL of every process | round",
    "SIGKILL of a client worker | round",
    "SIGKILL of the engine's core | round",
    "SIGSTOP of the engine's core | round",
    "port taken before it is bound | start",
    "out of memory | start",
    "closes mid-stream | all",
    "never ends any answer | all",
    "disk of runs full | round",
    "disk of MLflow full | start",
    "folder turns read-only | round",
    "SQLite overwritten by another | round",
    "wall clock jumps a day back | all",
    "workload's file edited | round",
)
_BY_KEY = {fault.key: fault for fault in FAULTS}
# What a message must hold, so that it says what happened and what to do next.
_SAYS = {
    "SIGTERM": ("interrupted", "study.name"),
    "SIGINT twice": ("interrupted", "study.name"),
    "SIGKILL of a client worker": ("a client worker was ended by SIGKILL", "study.name=s"),
    "SIGKILL of the engine's core": ("core process had ended", "engine.log", "study.name=s"),
    "SIGSTOP of the engine's core": ("engine.stall_timeout_s=1.5", "the engine hangs", "study.name=s"),
    "never ends any answer": ("engine.stall_timeout_s=1.5", "study.name=s"),
    "disk of MLflow full": ("is full; free some space",),
    "folder turns read-only": ("Read-only file system", "Make it writable"),
    "workload's file edited": ("not the planned one", "study.name=s"),
}


@pytest.fixture(scope="module")
def place() -> Iterator[Site]:
    with site() as made:
        yield made


@pytest.mark.parametrize("fault", [_BY_KEY[key] for key in REDUCED], ids=REDUCED)
def test_a_fault_loses_nothing_leaves_nothing_and_the_study_goes_on(fault: Fault, place: Site) -> None:
    if fault.needs_mount and not place.can_mount:
        pytest.skip("only root can mount a small file system")
    found = place.inject(fault)
    assert not found.problems, found
    for words in _SAYS.get(fault.name, ()):
        assert words in "\n".join(found.message)


def test_studies_share_a_store(place: Site) -> None:
    for found in parallel_studies(place, 4):
        assert not found.problems, found
