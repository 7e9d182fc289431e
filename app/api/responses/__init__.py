"""OpenAI's ``/v1/responses``, as a translation onto the chat service."""
