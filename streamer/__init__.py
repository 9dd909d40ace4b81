"""ggufd: makes a GGUF model resident on one device, tells the truth meanwhile, and serves it.

Rooms, lowest first; a room imports only rooms before it (`pyproject.toml`, import-linter):
errors, trace, config, systemd, process < gguf < plan < device < kernels < transfer < residency < load
< cache < models < engine < text < server < bench < cli < service.
"""

__version__ = "0.1.0"
