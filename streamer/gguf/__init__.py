"""From bytes to a directory of tensors. The file is hostile: every size is checked before it is believed.

Knows: the format, quant types' sizes, mappings of files. Must not know: devices, plans, what a tensor means.
"""
