"""Mixes of traffic classes with bursts, priorities and deadlines."""

import numpy as np
from numpy.typing import NDArray

from llmexp.models import Model
from llmexp.schema.workloads import Mixed
from llmexp.workloads.draws import Vocabulary, apportioned, lengths, permutation, popular, uniforms
from llmexp.workloads.synthetic import shared_for_reuse, sharing_prompts
from llmexp.workloads.workload import Workload


def mixed(config: Mixed, model: Model) -> Workload:
    """Requests of all classes in random order, each class with its own prefixes and lengths.

    Raises WorkloadError if a suffix is too short to tell the prompts apart, or lengths cannot give `reuse`.
    """
    count, seed = config.num_requests, config.seed
    names = list(config.classes)
    weights = [each.weight for each in config.classes.values()]
    member = apportioned(weights, count, seed, "classes")[permutation(count, seed, "order")]
    prefix = np.empty(count, np.int64)
    shared, suffix, output = (np.empty(count, np.int32) for _ in range(3))
    num_prefixes = 0
    for number, (name, each) in enumerate(config.classes.items()):
        of_class = np.flatnonzero(member == number)
        size = len(of_class)
        chosen = popular(size, each.num_prefixes, each.zipf, seed, "popularity", name)
        prefix[of_class] = num_prefixes + chosen[permutation(size, seed, "prefixes", name)]
        shared[of_class] = each.prefix_tokens
        suffix[of_class] = lengths(each.suffix_tokens, size, seed, "suffix", name)
        output[of_class] = lengths(each.output_tokens, size, seed, "output", name)
        num_prefixes += each.num_prefixes
    prompt_tokens = shared + suffix
    vocabulary = Vocabulary(model, seed)
    if config.reuse is not None:
        marks = vocabulary.mark_tokens(num_prefixes + count)
        shared = shared_for_reuse(config.reuse, config.reuse_block_size, prompt_tokens, prefix, marks)
    settings = [config.classes[names[number]] for number in member]
    columns = {
        "class": np.array([names[number] for number in member], object),
        "prefix": prefix,
        "deadline_s": np.array([each.deadline_s or np.inf for each in settings]),
    }
    if config.send_priority:
        columns["priority"] = np.array([each.priority for each in settings])
    return Workload(
        name=config.kind,
        recipe={},
        prompt_at=sharing_prompts(vocabulary, prefix, shared, prompt_tokens, num_prefixes),
        prompt_tokens=prompt_tokens,
        output_tokens=output,
        arrivals_s=bursty_arrivals(config, -np.log(uniforms(count, seed, "arrivals"))),
        columns=columns,
    )


def bursty_arrivals(config: Mixed, gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Arrival times of a Poisson process whose rate is higher in each period's burst, shape `(n,)`.

    `gaps` are unit exponentials. Their running sum is the expected number of arrivals so far, which is turned
    into time by inverting the rate's integral; the mean rate over whole periods is `rate_per_s`.
    """
    expected = np.cumsum(gaps)
    if config.bursts is None:
        return np.asarray(expected / config.rate_per_s)
    every, duration, factor = config.bursts.every_s, config.bursts.duration_s, config.bursts.factor
    calm_rate = config.rate_per_s * every / (every + duration * (factor - 1))
    periods, rest = np.divmod(expected, config.rate_per_s * every)
    in_burst = np.minimum(rest, calm_rate * factor * duration)
    return np.asarray(periods * every + in_burst / (calm_rate * factor) + (rest - in_burst) / calm_rate)
