"""Optimizers that do more with a step of another: average, accumulate, skip, or keep it in more bits."""
