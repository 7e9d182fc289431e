"""``make clients``: other people's clients against a server of ours."""
