"""The fleet's size on real Ray Serve: load, what is watched meanwhile, what is made of it."""
