"""``pytest tests/simulate --hypothesis-profile=thorough`` runs fifty times as many random cases."""

import os

from hypothesis import settings

settings.register_profile("thorough", max_examples=5000)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
