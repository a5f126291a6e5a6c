"""Models as points: distances, the losses between them, and the order of their neurons."""
