"""The deterministic model of a serving engine: vLLM's scheduler block for block, and what no engine has.

    from llmexp.simulate import Request, Settings, simulate

    result = simulate(
        [Request(prompt_token_ids=[1, 2, 3], output_tokens=10, arrival_s=0.5)],
        Settings(num_gpu_blocks=1000, max_num_seqs=64),
    )
    result.requests["first_token_s"], result.steps["hits"]

What is asked lies in ``requests`` (objects, or columns for millions), the engine's options in ``settings``, the
engine itself in ``sequence``, ``cache``, ``blocks``, ``radix``, ``policies`` and ``scheduler``, its world in
``arrivals``, ``cost`` and ``loop``, and ``kernel`` is all of vLLM's part compiled. ``roofline`` and ``calibrate``
make costs, from what ``measured`` reads, into the file of ``calibration``, which is ``llmexp calibrate`` (``command``).
``engine`` is the engine that a run's config describes (``engine=simulator``); ``records``, ``timeline``,
``starvation`` and ``summary`` say what happened, and ``studies`` are the experiments that no engine can make.
``allocators`` stands alone.
"""

from llmexp.simulate.cost import UNIT_COST, FrontEnd, StepCost, Work
from llmexp.simulate.requests import Request, Requests
from llmexp.simulate.settings import Settings
from llmexp.simulate.simulation import Simulation, simulate

__all__ = [
    "UNIT_COST",
    "FrontEnd",
    "Request",
    "Requests",
    "Settings",
    "Simulation",
    "StepCost",
    "Work",
    "simulate",
]
