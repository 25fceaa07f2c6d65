"""Gradient scaling in several processes: all ranks take the same decision."""
