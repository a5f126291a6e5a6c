"""Where models lie: distances, the losses between them, and the order of their neurons."""
