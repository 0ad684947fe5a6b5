"""For all tests: what an example takes says how busy the machine is, and nothing else."""

from hypothesis import settings

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")
