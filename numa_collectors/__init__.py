"""NUMA process orchestration for reinforcement learning."""
