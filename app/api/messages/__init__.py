"""Anthropic's ``/v1/messages``, as a translation onto the chat service."""
