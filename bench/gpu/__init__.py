"""Parts of `gpu_all.py`, and the pairs that it and `gpu_model.py` measure."""
