"""What a layer's operators compute, twice behind one contract (`ops.py`): plainly in numpy and in CUDA.

`X.py` holds the numpy `*_reference` of an operator and the launcher of `X.cu` beside it; `host_ops.py` and
`cuda_ops.py` put them together. Knows arrays and devices; must not know a model's name, requests or files.
Import it as `streamer.kernels`: a top-level `kernels` is another project's package.
"""

if __name__ != "streamer.kernels":
    raise ImportError("import streamer.kernels; a top-level 'kernels' module is not ours")
