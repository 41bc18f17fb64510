"""What runs on one device: products, attention, pointwise operations, random numbers."""
