"""Text to ids and back: tokenizers built from a file's metadata, chat templates in a sandbox, streaming detokenizer.

Knows: metadata, strings. Must not know: HTTP, devices. Text of users never becomes control tokens.
"""
