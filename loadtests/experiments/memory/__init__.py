"""How well KV memory is used: the paged scheduler next to contiguous allocation, in simulated time."""
