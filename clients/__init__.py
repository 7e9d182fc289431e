"""Clients of a server of ours: ``make clients`` runs other people's, ``clients.neighbors`` hostile ones."""
