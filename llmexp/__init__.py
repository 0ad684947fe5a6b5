"""Controlled experiments on LLM serving: composable configs, paired runs on vLLM, MLflow tracking."""
