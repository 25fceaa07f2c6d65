"""Random programs: what a region does is what an interpreter of the documented semantics computes without autocast."""
