"""Model files and model code.

Torch-free: where a model comes from (`load.open_model`), what it looks like (`ModelFacts`), its weights in
one canonical form (`weights`), its tokenizer and chat template. The torch forward pass imports these, never
the other way round. Nothing is imported here, so that a process pays only for the modules it uses.
"""
