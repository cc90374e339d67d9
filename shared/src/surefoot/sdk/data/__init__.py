"""Which samples a step trains on, and how a rank gets them."""
