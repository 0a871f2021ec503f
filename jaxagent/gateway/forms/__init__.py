"""Dialects: the bodies of OpenAI and Anthropic APIs as `chat.Ask`, and answers as their bytes; one module each."""
