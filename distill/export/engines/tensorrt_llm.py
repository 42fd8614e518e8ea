"""TensorRT-LLM: runs draft and target as one model, configured by a YAML file."""

from distill.export.engine import Engine, register

register(Engine("TensorRT-LLM", "1.3", "tensorrt_llm.j2", 5, lambda facts: "greedy-draft", one_pass=True))
