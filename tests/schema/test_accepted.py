"""What a wrong value is answered with: every key of the schema is named, with what was got and what is accepted."""

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from llmexp.compose import compose
from llmexp.schema import engine, load, simulation, study, workloads
from llmexp.schema.accepted import explained
from llmexp.schema.config import Config, no_such_key

WRONG: list[Any] = [
    *("x!", "", True, 7, 7.5, -3, float("inf"), 10**30, None),
    *([], ["x!"], [-1], {}, {"a b!": {}}, {"c": -1}),
]
MODULES = (engine, load, simulation, study, workloads)
CLASSES = {name for module in MODULES for name, found in inspect.getmembers(module) if inspect.isclass(found)}
FOREIGN = re.compile(  # what pydantic says, and what Python and we call things
    r"pydantic|[Ii]nput should|[Tt]uple|\b(dict|Mapping|str|int|float|bool|NoneType|None|True|False)\b|constrained|"
    rf"valid (string|integer|number|list)|For further|_shape|\b({'|'.join(CLASSES)})\b"
)
MORE: dict[str, Any] = {  # what is empty by default and has keys of its own
    "workload.suffix_tokens": {"distribution": "uniform", "min": 1, "max": 2},
    "workload.output_tokens": {"distribution": "lognormal", "median": 5.0, "sigma": 1.0, "min": 1, "max": 9},
    "workload.bursts": {"every_s": 2.0, "duration_s": 1.0, "factor": 2.0},
    "workload.classes": {"chat": workloads.TrafficClass().model_dump(mode="json")},
    "study.claims": [{"measure": "ttft_ms_p50", "direction": "lower", "threshold": 0.9, "cell": {"cache": "on"}}],
    "study.cells": [{"max_num_seqs": "4"}],
    "engine.args": {"swap_space": 1},
    "engine.env": {"A": "b"},
    "run.cell": {"cache": "on"},
    **{f"simulation.{name}": [8] for name in ("capacity_tokens", "in_flight", "token_budgets")},
    **{f"simulation.{name}": [0.5] for name in ("capacity_shares", "rates_per_s")},
}


def configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """A whole config for each kind of each group, and the section that is to be looked at."""
    base = compose(["model=tiny_random", "gpu=cpu", "tracking=off"]).model_dump(mode="json")
    for group in Config.model_fields:
        kinds = [kind for kind in get_args(Config.model_fields[group].annotation) if hasattr(kind, "model_fields")]
        for kind in kinds or [None]:
            values = copy.deepcopy(base)
            if kind is not None:
                made = {name: "x" if f.is_required() else _default(f) for name, f in kind.model_fields.items()}
                values[group] = made
            for key, more in MORE.items():
                section, _, name = key.partition(".")
                if section == group and name in values[group]:
                    richer = {**values, group: {**values[group], name: copy.deepcopy(more)}}
                    values = min(richer, values, key=mistakes)
            yield group, values


def mistakes(values: dict[str, Any]) -> int:
    try:
        Config.model_validate(values)
    except ValidationError as error:
        return error.error_count()
    return 0


def _default(field: Any) -> Any:
    value = field.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


def paths(values: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Everything in a section, lists and sections included."""
    yield path
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for part, inner in inside:
        yield from paths(inner, (*path, part))


def answer(values: dict[str, Any], path: tuple[Any, ...], wrong: Any) -> list[str]:
    """What is said of a config with one value replaced."""
    place: Any = (changed := copy.deepcopy(values))
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = wrong
    try:
        Config.model_validate(changed)
    except ValidationError as error:
        return explained(error, Config, changed, no_such_key)
    return []


def test_every_key_is_named_with_what_was_got_and_what_is_accepted() -> None:
    seen = 0
    for group, values in configs():
        Config.model_validate(values)
        for path in paths(values[group], (group,)):
            key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
            answers = {repr(wrong): said for wrong in WRONG if (said := answer(values, path, wrong))}
            assert answers, f"{key} takes anything"
            for wrong, said in answers.items():
                where = f"{key}={wrong}: {said}"
                for line in said:
                    assert not FOREIGN.search(re.sub("got .*?;", "", line)), where
                    if f"{path[-1]}=" in line and key.rpartition(".")[0] in line:
                        continue  # values that do not go together
                    assert line.startswith(key), where
                    assert re.search("(got .*|it needs to be set); accepted is|: no |quote it", line), where
            seen += 1
    assert seen > 250


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("simulation.capacity_tokens=[-1]", "simulation.capacity_tokens[0]: got -1; accepted is an integer from 1 to"),
        (
            "simulation.capacity_tokens=[]",
            "simulation.capacity_tokens: got []; accepted is a list of at least 1 element",
        ),
    ],
)
def test_a_list_is_answered_for_once(override: str, said: str) -> None:
    from llmexp.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        compose(["experiment=block_size", override])
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_a_key_may_look_like_a_word_of_pydantics() -> None:
    with pytest.raises(ValidationError) as error:
        engine.KvConfig.model_validate({"[key]": 1})
    assert explained(error.value, engine.KvConfig, {"[key]": 1})[-1] == "[key]: no such key"
