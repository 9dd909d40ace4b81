"""Text to ids and back: tokenizers from metadata, chat templates in a sandbox, detokenizer, constraints.

Knows: metadata, strings. Must not know: HTTP, devices. Text of users never becomes control tokens.
"""
