"""The deterministic model of a serving engine: vLLM's scheduler block for block, and what no engine has."""

from llmexp.simulate.cost import UNIT_COST, StepCost, Work
from llmexp.simulate.requests import Request, Requests
from llmexp.simulate.settings import Settings
from llmexp.simulate.simulation import Simulation, simulate

__all__ = ["UNIT_COST", "Request", "Requests", "Settings", "Simulation", "StepCost", "Work", "simulate"]
