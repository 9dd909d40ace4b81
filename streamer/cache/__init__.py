"""What a sequence leaves behind between steps: KV pages and recurrent state, behind one face.

Knows: layouts, devices' memory. Must not know: models' formulas, requests' text. `pages.py` is pure.
"""
