"""What agents speak: OpenAI chat completions, completions and responses, and Anthropic messages.

Engines are asked for chat completions alone, and for plain completions where a client sends one. Each module here
turns the requests of one dialect into that and the answer, whole or as a stream, back. All of them are pure: bodies in,
bodies and events out; `gyre.proxy.service` does the rest.
"""
