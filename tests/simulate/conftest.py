"""``pytest tests/simulate --hypothesis-profile=thorough`` runs ten times as many random cases."""

import os

from hypothesis import settings

settings.register_profile("thorough", max_examples=1000)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
