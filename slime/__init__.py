"""slime: reinforcement learning of large language models."""
