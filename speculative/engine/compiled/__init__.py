"""Model calls on a CPU in compiled code: built once for a machine, for every model, shape and dtype that it serves."""
