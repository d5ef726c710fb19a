"""The trainer: Megatron-Core, on GPUs or CPU cores."""

from slime.backends.megatron_utils.device import adapt_megatron

adapt_megatron()  # before anything here imports megatron.core; does nothing where there is CUDA
