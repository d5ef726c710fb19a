"""Conversion of whole checkpoints, tensor by tensor: no model is built in memory and no process group is needed.

`stored.py` asks Megatron (a model without memory) under which names, shapes and offsets its distributed checkpoints
keep each parameter; the declarations in `slime/models` say what it is made of. Work is cut into units of a few tensors
that any process can do and that are done once (`units.py`).
"""
