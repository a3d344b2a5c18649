"""Hooks into other libraries. Each module imports its library only when it is asked to."""

from . import transformers as transformers

__all__ = ["transformers"]
