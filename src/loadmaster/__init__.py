"""loadmaster: weight and balance for vision-language models on your own GPUs."""

__version__ = "0.1.0"
