"""Knowledge distillation: a student learns from a teacher's answers, and from its inner values."""

from archipel.compression.distil.part import Distil as Distil

__all__ = ["Distil"]
